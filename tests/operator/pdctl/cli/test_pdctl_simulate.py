"""`pdctl simulate`: figures and files, and each input that it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from pdcluster_simulator.step_model import write_step_model
from pdctl.cli.main import app
from tests.schema.object_cases import minimal
from tests.simulator.small_clusters import make_times

LOAD = "seconds,requests_per_second,input_tokens,output_tokens\n0,1,100,10\n10,2,100,10\n"


def document(**spec: Any) -> dict[str, Any]:
    """One prefill and one decode worker on an H100 each."""
    found = minimal()
    found["spec"]["model"]["name"] = "tiny"
    for role in found["spec"]["roles"].values():
        role["pools"] = [{"name": "x", "gpu": "H100", "replicas": 1}]
    found["spec"].update(spec)
    return found


@pytest.fixture
def simulate(tmp_path: Path) -> Callable[..., Result]:
    """Run it on a load, an object and step times, each of which may be replaced."""

    def run(
        *options: str, spec: dict[str, Any] | None = None, trace: str = LOAD, **times: Any
    ) -> Result:
        file, load, steps = (tmp_path / name for name in ("a.yaml", "load.csv", "h100.json"))
        file.write_text(yaml.safe_dump(document(**(spec or {}))))
        load.write_text(trace)
        write_step_model(make_times(kv_tokens=10_000, **times), steps)
        given = ["simulate", str(file), "--trace", str(load), *options]
        if "--steps" not in options and "--model" not in options and times != {"gpu": ""}:
            given += ["--steps", str(steps)]
        return CliRunner().invoke(app, given)

    return run


def test_figures_and_files_are_those_of_one_run(simulate: Callable[..., Result], tmp_path: Path):
    result = simulate("--out", str(tmp_path / "out"))
    lines = result.output.splitlines()
    found = json.loads((tmp_path / "out" / "load.json").read_text())

    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "load.csv",
        "load.json",
        "load.png",
        "load.png.json",
    }
    summary = found["summary"]
    assert lines[0].startswith(f"chat: simulated, 2 accelerators, {summary['num_requests']} reque")
    assert f"goodput              {summary['goodput']:.3g} requests/s" in result.output
    rows = (tmp_path / "out" / "load.csv").read_text().splitlines()
    assert len(rows) == 1 + len(found["over_time"])
    assert "decode/x replicas" in rows[0]
    assert json.loads(simulate("--json").stdout)["summary"] == summary


def test_another_seed_draws_other_arrivals(simulate: Callable[..., Result]):
    first, same, other = (
        json.loads(simulate("--json", "--seed", seed).stdout)["summary"] for seed in ("1", "1", "2")
    )
    assert first == same != other


@pytest.mark.processes
def test_cells_are_as_many_clusters(simulate: Callable[..., Result]):
    output = simulate("--cells", "3", "--processes", "1").output
    assert "6 accelerators in 3 clusters" in output
    found = json.loads(simulate("--cells", "3", "--processes", "2", "--json").stdout)
    assert found["accelerators"] == 6
    assert found["samples"][0]["accelerators"] == {"H100": 6}


def test_a_roll_out_has_its_lines(simulate: Callable[..., Result]):
    gates = {"strategy": "Rolling", "onFailure": "Pause"}
    given = ["--rollout-at", "5", "--start-seconds", "5"]
    output = simulate(*given, spec={"rollout": gates}).output
    assert "roll out             Rolling at 5 s: " in output
    assert ", 4 H100 at most" in output
    assert "ready in it          at least prefill 1, decode 1; out of the ratio band 0.0%" in output
    assert "not simulated        rollout.onFailure" in output


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--rollout-at", "20"], "--rollout-at: is 20, and the trace has 20 s; give 0 to less"),
        (["--rollout-at", "-1"], "--rollout-at: is -1, and"),
        (["--rollout-at", "nan"], "--rollout-at: is nan, and"),
        (["--rollout-at", "5", "--cells", "2"], "--rollout-at: is for one cluster, and --cells"),
    ],
)
def test_a_roll_out_that_cannot_be_is_refused(
    simulate: Callable[..., Result], given: list[str], text: str
):
    result = simulate(*given)
    assert (result.exit_code, text in result.output) == (2, True), result.output


def test_what_is_not_simulated_is_said(simulate: Callable[..., Result]):
    output = simulate(spec={"routing": {"racing": {"enabled": True}}}).output
    assert "not simulated        routing.racing" in output


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (("--cells", "0"), {}, "--cells: is 0; give 1 to 4096"),
        (("--processes", "9999"), {}, "--processes: is 9999; give 1 to 256"),
        (("--start-seconds", "nan"), {}, "--start-seconds: is nan; give a finite number from 0"),
        (
            ("--autoscale",),
            {},
            "spec.autoscale: is not in the file; give it the section, or leave --autoscale out",
        ),
        (
            (),
            {"model": "other"},
            "was measured with the model other, and the file's spec.model.name is tiny; measure "
            "that model, or correct the name",
        ),
        (
            (),
            {"gpu": "B200"},
            "spec.roles.prefill.pools[0].gpu: H100 has no step times; give --steps FILE, or "
            "--model NAME or FOLDER for the tables",
        ),
        (
            ("--model", "no-such-model"),
            {},
            "H100: the tables have no steps of no-such-model with TP1",
        ),
        (
            (),
            {"spec": {"engine": {"dataParallelSize": 2}}},
            "spec.engine.dataParallelSize: is 2: an engine of several ranks is not simulated; set "
            "it to 1, with as many replicas more",
        ),
        (
            (),
            {"spec": {"engine": {"maxModelLen": 100_000}}},
            "spec.engine.maxModelLen: is 100000, and the KV cache holds 10000 tokens; lower it",
        ),
        (
            (),
            {"trace": LOAD.replace("10,2,100", "10,2,-4")},
            "load.csv: line 3, column input_tokens: must not be negative",
        ),
        (
            (),
            {"trace": LOAD.replace("0,1,", "0,0,").replace("10,2,", "10,0,")},
            "has no request; raise requests_per_second, or the time between the rows",
        ),
    ],
)
def test_an_input_is_refused_with_its_fix(
    simulate: Callable[..., Result],
    options: tuple[str, ...],
    given: dict[str, Any],
    message: str,
):
    result = simulate(*options, **given)

    assert result.exit_code == 2, result.output
    assert message in result.stderr.replace("\n", " ")


def test_a_type_without_numbers_is_named(simulate: Callable[..., Result]):
    pool = {"pools": [{"name": "x", "gpu": "toy", "replicas": 1}]}
    toy = {"accelerators": {"toy": {"resource": "toy.com/gpu"}}}
    roles = {"prefill": pool, "decode": pool}
    result = simulate(spec={**toy, "roles": roles, "engine": {"device": "cpu"}})

    assert result.exit_code == 2
    assert (
        "spec.roles.prefill.pools[0].gpu: toy has no numbers to compute the seconds of a step "
        "from; measure it and give --steps FILE, or give spec.accelerators.toy its numbers"
    ) in result.stderr


def test_without_the_simulator_it_says_how_to_install_it(
    simulate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pdctl.cli.simulate.find_spec", lambda name: None)
    result = simulate()

    assert result.exit_code == 1
    assert "this needs the simulator: pip install 'pdcluster[simulate]'" in result.stderr
