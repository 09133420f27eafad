"""`pdctl autoscale replay`: files that it writes, and input that it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pdctl.cli.main import app
from tests.schema.object_cases import at, both, minimal

TRACE = "seconds,requests_per_second,input_tokens,output_tokens\n0,1,1000,100\n60,30,1000,100\n"


@pytest.fixture
def replayed(tmp_path: Path) -> Callable[..., Any]:
    """Run it on a small trace and object; the output goes to the folder `out`."""

    def run(*options: str, trace: str = TRACE, spec: Any = None) -> Any:
        document = minimal()
        at("spec.roles.decode.pools.0.maxReplicas", 4)(document)
        if spec is not None:
            spec(document)
        (tmp_path / "burst.csv").write_text(trace)
        (tmp_path / "chat.yaml").write_text(yaml.safe_dump(document))
        arguments = [
            "autoscale",
            "replay",
            str(tmp_path / "burst.csv"),
            "-f",
            str(tmp_path / "chat.yaml"),
            *options,
        ]
        return CliRunner().invoke(app, arguments)

    return run


def test_figures_alone_need_no_folder(replayed: Callable[..., Any], tmp_path: Path):
    result = replayed()

    assert result.exit_code == 0
    assert result.output.startswith("0.0 hours, 1860 requests\naccelerator hours    ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["burst.csv", "chat.yaml"]


def test_table_decisions_and_picture_are_written(replayed: Callable[..., Any], tmp_path: Path):
    result = replayed("--out", str(tmp_path / "a" / "out"))
    files = {path.name: path for path in (tmp_path / "a" / "out").iterdir()}

    assert result.exit_code == 0
    assert set(files) == {"burst.csv", "burst-decisions.txt", "burst.png"}
    assert f"written              {files['burst.png']}" in result.output.splitlines()
    assert len(files["burst.csv"].read_text().splitlines()) == 25
    decisions = files["burst-decisions.txt"].read_text()
    assert decisions.startswith("chat, 2026-01-05 00:01:")
    assert max(map(len, decisions.splitlines())) <= 100


def test_without_the_picture_matplotlib_is_not_asked_for(
    replayed: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pdctl.replay.plot.find_spec", lambda name: None)
    out = tmp_path / "out"

    refused = replayed("--out", str(out))
    assert (refused.exit_code, out.exists()) == (1, False)
    assert refused.stderr == (
        "error: plots need matplotlib: pip install 'pdcluster-operator[replay]', or go without "
        "with --no-plot\n"
    )
    assert replayed("--out", str(out), "--no-plot").exit_code == 0
    assert sorted(path.name for path in out.iterdir()) == ["burst-decisions.txt", "burst.csv"]
    assert replayed().exit_code == 0


def test_speeds_of_workers_count(replayed: Callable[..., Any]):
    slow, fast = (
        replayed("--prefill-tokens-per-second", number).output for number in ("2000", "200000")
    )

    def ttft(output: str) -> float:
        return float(output.partition("TTFT ")[2].partition(" s")[0])

    assert "requests wait: the trace ends under load" in slow
    assert ttft(slow) > 10.0 > 0.1 > ttft(fast)


def test_estimates_of_another_accelerator_are_called_so(replayed: Callable[..., Any]):
    own = ("--prefill-tokens-per-second", "2000", "--kv-tokens", "9000")
    listed = at("spec.roles.prefill.pools.0.gpu", "B200")

    assert (
        "estimated speeds     taken for cpu as for B200 and cpu as for B300: give your own"
        in replayed().output
    )
    assert "estimated speeds     taken for cpu as for B300: " in replayed(spec=listed).output
    eight = at("spec.roles.prefill.pools.0.gpusPerReplica", 8)
    assert "taken for 8 x B200 as for B200 and" in replayed(spec=both(listed, eight)).output
    assert "estimated speeds" not in replayed(*own).output


def test_wrong_trace_is_exit_2_with_a_line_for_each_fault(
    replayed: Callable[..., Any], tmp_path: Path
):
    result = replayed(trace=TRACE + "30,nan,1,1\n90,-1,1,1\n")

    assert result.exit_code == 2
    assert [line.partition(";")[0] for line in result.stderr.splitlines()] == [
        f"error: {tmp_path}/burst.csv: line 4, column requests_per_second: must be a finite "
        "number, not nan",
        f"error: {tmp_path}/burst.csv: line 5, column requests_per_second: must not be negative, "
        "not -1",
    ]


def test_wrong_object_and_mixed_are_exit_2(replayed: Callable[..., Any]):
    wrong = replayed(spec=at("spec.autoscale", {"tolerance": 3}))
    mixed = replayed(spec=at("spec.roles", {"mixed": {"pools": [{"name": "cpu", "replicas": 1}]}}))

    assert (wrong.exit_code, "chat.yaml: spec.autoscale.tolerance: " in wrong.stderr) == (2, True)
    assert (mixed.exit_code, "chat.yaml: spec.roles.mixed: cannot be replayed" in mixed.stderr) == (
        2,
        True,
    )


def test_wrong_speed_is_exit_2(replayed: Callable[..., Any]):
    result = replayed("--kv-tokens", "0")

    assert (result.exit_code, result.stderr) == (
        2,
        "error: --kv-tokens: must not be 0; give a finite number of more than 0\n",
    )


def test_a_folder_that_cannot_be_written_is_named(replayed: Callable[..., Any], tmp_path: Path):
    (tmp_path / "file").write_text("")
    result = replayed("--out", str(tmp_path / "file"), "--no-plot")

    assert result.exit_code == 1
    assert (
        result.stderr
        == f"error: {tmp_path}/file: cannot be written: File exists; give another folder with "
        "--out\n"
    )
