"""`pdctl plan --slo --trace`: what it takes from a trace, and each trace that it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pdcluster_schema.load import load_applied
from pdctl.cli.main import app
from pdctl.sizing import tables
from tests.operator.pdctl.planned_models import LLAMA

HEADER = "seconds,requests_per_second,input_tokens,output_tokens\n"
LOAD = HEADER + "0,4,1000,300\n600,12,2000,200\n1200,4,1000,300\n"
EXAMPLES = Path(__file__).parents[4] / "examples" / "traces"

Plan = Callable[..., Result]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """By our roofline.  text: of the trace"""
    monkeypatch.setattr(tables, "is_installed", lambda: False)
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))

    def run(*options: object, text: str = LOAD, name: str = "load.csv", gpus: int = 16) -> Result:
        (tmp_path / name).write_text(text)
        given = ["--model", folder, "--trace", tmp_path / name]
        given += ["--gpu", f"H100={gpus}"] * bool(gpus)
        given += ["--ttft", "1", "--itl", "0.03", *options]
        return CliRunner().invoke(app, ["plan", "--slo", *map(str, given)])

    return run


def found(done: Result) -> Any:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_it_says_what_was_taken_and_writes_it_into_the_manifest(plan: Plan, tmp_path: Path):
    done = plan("--percentile", 90, "--out", tmp_path / "plan.yaml")
    words = " ".join(done.output.split())
    assert done.exit_code == 0, done.output
    assert "12000 requests in 30 min; prompts of 1600 tokens in the mean (p50 2000" in words
    assert "TTFT by a prompt of 2000 tokens (p90)" in words
    assert "Sized for the peak of its rate, 12 requests/s (6.67 in the mean): 24000" in words
    assert "M/G/n" in words
    text = (tmp_path / "plan.yaml").read_text()
    assert text.startswith("# pdctl plan --slo: ")
    assert "\n# Sized for the peak of its rate, 12 requests/s" in text
    assert load_applied(tmp_path / "plan.yaml").spec.engine.max_model_len


@pytest.mark.parametrize(("gpu", "itl"), [("L40S", 0.1), ("L40S", 0.04), ("A100-80GB", 0.03)])
def test_a_simulation_of_the_plan_holds_its_objectives(
    plan: Plan, tmp_path: Path, gpu: str, itl: float
):
    load = HEADER + "".join(f"{at},4,3000,200\n" for at in (0, 80))
    limits = ["--gpu", f"{gpu}=8", "--ttft", 2, "--itl", itl, "--percentile", 90]
    plan(*limits, "--out", tmp_path / "plan.yaml", text=load, gpus=0)
    given = ["simulate", tmp_path / "plan.yaml", "--trace", tmp_path / "load.csv", "--json"]
    done = CliRunner().invoke(app, [*map(str, given), "--model", str(tmp_path / "llama-8b")])
    summary = found(done)["summary"]
    assert summary["ttft"]["p90"] <= 2.0
    assert summary["itl"]["p90"] <= itl


def test_fewer_workers_hold_a_lower_percentile_of_the_rate(plan: Plan):
    peak, median = found(plan("--json")), found(plan("--json", "--rate-percentile", 60))
    assert peak["trace"]["requests_per_second"] == 12.0
    assert median["trace"]["requests_per_second"] == 4.0
    assert median["placements"][0]["gpus"] < peak["placements"][0]["gpus"] <= 16
    assert {one["requests_per_second"] for one in peak["placements"]} == {12.0}
    assert peak["trace"]["input_tokens"] == {"p50": 2000, "p90": 2000, "p99": 2000}
    assert "lengths" not in peak["objective"]


def test_prefixes_of_the_trace_are_computed_once(plan: Plan):
    def rows(shared: bool) -> str:
        row = {"input_length": 8192, "output_length": 64}
        ids = [[*range(14), *(1000 + 2 * n + i for i in range(2))] for n in range(3000)]
        extra = [{"hash_ids": each} if shared else {} for each in ids]
        lines = [{"timestamp": 40 * n, **row, **each} for n, each in enumerate(extra)]
        return "\n".join(map(json.dumps, lines))

    alone, shared = (
        found(plan("--json", text=rows(each), name="t.jsonl")) for each in (False, True)
    )
    assert (alone["trace"]["shared_prefix_ratio"], shared["trace"]["shared_prefix_ratio"]) == (
        0.0,
        pytest.approx(14 / 16, abs=0.001),
    )
    assert shared["placements"][0]["gpus"] < alone["placements"][0]["gpus"]
    assert (
        "Prefixes: 87% of the prompt tokens come again; counted as cached are 87% to"
        in " ".join(plan(text=rows(True), name="t.jsonl").output.split())
    )


def test_two_types_share_a_role_where_neither_holds_the_load(plan: Plan, tmp_path: Path):
    out = tmp_path / "plan.yaml"
    done = plan("--gpu", "H200=1", "--out", out, gpus=1)
    assert done.exit_code == 0, done.output
    assert "1 x H100 TP1 b40, 1 x H200 TP1 b40" in done.output
    pools = load_applied(out).spec.roles.mixed.pools
    assert [(pool.gpu, pool.replicas) for pool in pools] == [("H100", 1), ("H200", 1)]


def test_a_shipped_trace_is_planned(plan: Plan):
    text = (EXAMPLES / "prompt-to-output-heavy.csv").read_text()
    trace = found(plan("--json", text=text, gpus=64))["trace"]
    assert (trace["seconds"], trace["window_seconds"]) == (10800.0, 60.0)
    # the peaks of prompts and of answers are at different times
    assert trace["prompt_tokens_per_second"] > 40_000
    assert trace["answer_tokens_per_second"] > 15_000


@pytest.mark.parametrize(
    ("options", "given", "sentence"),
    [
        (["--input", "5"], {}, "--input: lengths are those of --trace; leave one of both out"),
        (["--output", "5"], {}, "--output: lengths are those of --trace; leave one of both out"),
        (["--rate-percentile", "101"], {}, "--rate-percentile: is 101; give 50 to 100, or leave"),
        (["--rate-percentile", "nan"], {}, "--rate-percentile: is nan; give 50 to 100, or leave"),
        (["--trace-block-tokens", "0"], {}, "--trace-block-tokens: is 0; give 1 to 1048576"),
        ([], {"text": ""}, "load.csv: is empty; write the line seconds,"),
        (
            [],
            {"text": HEADER + "0,1,-5,1\n60,1,1,1\n"},
            "load.csv: line 2, column input_tokens: must not be negative, not -5; write a number",
        ),
        (
            [],
            {"text": HEADER + "0,1,5,\n60,1,1,1\n"},
            "load.csv: line 2, column output_tokens: is empty; write a number from 0 on",
        ),
        (
            [],
            {"text": HEADER + "60,1,5,1\n0,1,1,1\n"},
            "load.csv: line 3, column seconds: must be more than 60 of the row before, not 0; sort",
        ),
        (
            [],
            {"text": '{"timestamp": 1, "input_length": -4, "output_length": 1}', "name": "t.jsonl"},
            "t.jsonl: line 1, input_length: must not be -4; write a finite number from 1 on",
        ),
        (
            [],
            {"text": HEADER + "0,1,200000,10\n60,1,1,1\n"},
            "--trace: its longest request has 200010 tokens, and the model takes 131072 "
            "(max_position_embeddings); leave such requests out of the trace, or plan a model",
        ),
        (
            ["--percentile", "90"],
            {"gpus": 1},
            "--trace: its peak is 12 requests/s, and 1 H100 hold about",
        ),
    ],
)
def test_a_bad_trace_is_answered_with_what_works(
    plan: Plan, options: list[str], given: dict[str, Any], sentence: str
):
    done = plan(*options, **given)
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_options_of_a_trace_want_one():
    given = ["--slo", "--model", "m", "--gpu", "H100=1", "--input", "1", "--output", "1"]
    limits = ["--ttft", "1", "--itl", "1", "--rate-percentile", "90"]
    alone = CliRunner().invoke(app, ["plan", *given, *limits])
    assert alone.exit_code == 2
    assert "--rate-percentile: is of a trace's rate; give --trace" in alone.stderr
    for name, value in (("--trace", "a.csv"), ("--rate-percentile", "90")):
        without = CliRunner().invoke(app, ["plan", name, value])
        assert f"{name}: is of --slo; give --slo, or leave it out" in without.stderr
