"""Files of `pdctl autoscale replay`; figures and refusals are in tests/golden/operator."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pdcluster_schema.load import parse
from pdcluster_simulator.step_model import write_step_model
from pdctl.cli.main import app
from pdctl.simulation.inputs import times_of_speeds
from pdctl.simulation.speeds import Speeds
from tests.schema.object_cases import at, minimal
from tests.simulator.small_clusters import make_times

TRACE = "seconds,requests_per_second,input_tokens,output_tokens\n0,1,1000,100\n60,12,1000,100\n"


@pytest.fixture
def replayed(tmp_path: Path) -> Callable[..., Any]:
    """Run it on a small trace and object."""
    trace, file = tmp_path / "burst.csv", tmp_path / "chat.yaml"
    document = minimal()
    at("spec.roles.decode.pools.0.maxReplicas", 4)(document)
    trace.write_text(TRACE)
    file.write_text(yaml.safe_dump(document))
    command = ["autoscale", "replay", str(trace), "-f", str(file)]
    return lambda *options: CliRunner().invoke(app, [*command, *options])


def test_table_decisions_and_picture_are_written(replayed: Callable[..., Any], tmp_path: Path):
    result = replayed("--out", str(tmp_path / "a" / "out"))
    files = {path.name: path for path in (tmp_path / "a" / "out").iterdir()}

    assert result.exit_code == 0
    assert set(files) == {
        *("burst.csv", "burst.json", "burst-decisions.txt"),
        *("burst.png", "burst.png.json"),
    }
    for name in files:
        assert f"written              {files[name]}" in result.output.splitlines()
    assert len(files["burst.csv"].read_text().splitlines()) > 24
    decisions = files["burst-decisions.txt"].read_text()
    assert decisions.startswith("chat, 2026-01-05 00:01:")
    assert max(map(len, decisions.splitlines())) <= 100


def test_without_the_picture_matplotlib_is_not_needed(
    replayed: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pdctl.figures.find_spec", lambda name: None)
    out = tmp_path / "out"

    refused = replayed("--out", str(out))
    assert (refused.exit_code, out.exists()) == (1, False)
    assert "pip install matplotlib" in refused.stderr
    assert replayed("--out", str(out), "--no-plot").exit_code == 0
    assert {path.suffix for path in out.iterdir()} == {".txt", ".csv", ".json"}
    assert replayed().exit_code == 0


def test_the_mode_does_not_matter_and_mixed_workers_are_replayed(
    replayed: Callable[..., Any], tmp_path: Path
):
    document = minimal()
    document["spec"]["roles"] = {"mixed": {"pools": [{"name": "x", "replicas": 1}]}}
    document["spec"]["autoscale"] = {"mode": "Advise"}
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(document))

    output = replayed("--start-seconds", "10").output
    assert "time over threshold  mixed" in output
    assert "changes              0" not in output


def test_measured_step_times_go_before_speeds(replayed: Callable[..., Any], tmp_path: Path):
    steps = tmp_path / "steps.json"
    write_step_model(make_times(gpu="cpu", kv_tokens=100_000), steps)
    output = replayed("--steps", str(steps)).output

    assert "step times           cpu a table: made up" in output
    assert "estimated for" not in output
    assert "for prefill: estimated for one B200 and a 70B model" in replayed().output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "--prefill-tokens-per-second",
            "0",
            "--prefill-tokens-per-second: must not be 0; give a finite number of more than 0",
        ),
        (
            "--step-seconds",
            "nan",
            "--step-seconds: must not be nan; give a finite number of more than 0",
        ),
        (
            "--stream-seconds",
            "-1",
            "--stream-seconds: must not be -1; give a finite number from 0 on",
        ),
        ("--start-seconds", "-1", "--start-seconds: is -1; give a finite number from 0 on"),
    ],
)
def test_speeds_that_cannot_be_are_refused(
    replayed: Callable[..., Any], option: str, value: str, message: str
):
    result = replayed(option, value)

    assert result.exit_code == 2
    assert message in result.stderr


def test_workers_of_eight_accelerators_compute_as_eight():
    one = {"name": "x", "gpu": "H100", "replicas": 1}
    pools = [one, {**one, "name": "eight", "gpusPerReplica": 8}]
    document = minimal()
    document["spec"]["roles"] = {role: {"pools": pools} for role in ("prefill", "decode")}
    times = times_of_speeds(parse(document).spec, Speeds())

    for role in ("prefill", "decode"):
        slow, fast = (times[role, name] for name in ("x", "eight"))
        assert [slow.of_rows(n) / fast.of_rows(n) for n in (1, 100, 5000)] == [pytest.approx(8)] * 3
    assert times["prefill", "x"].of_rows(4000) == pytest.approx(0.5)
    assert times["decode", "x"].of_rows(101) == pytest.approx(0.032)
    assert times["decode", "x"].of_rows(4000) == pytest.approx(0.5)
