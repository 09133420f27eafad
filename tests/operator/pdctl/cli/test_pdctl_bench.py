"""`pdctl bench` against small servers; the options that it refuses are in tests/golden/operator."""

import doctest
import json
import shlex
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pdcluster_api.errors import StartError
from pdctl.bench import autotune, measure
from pdctl.bench.measure import StartedCluster, started_cluster
from pdctl.cli import bench_common, bench_serve
from pdctl.cli.main import app
from tests.operator.pdctl.bench.small_servers import SmallServer, events, serving_aside
from tests.schema.object_cases import minimal

SERVE = "serve --num-prompts 3 --input-len 8 --output-len 2"
SHORT = "--input-len 8 --output-len 2"

Bench = Callable[[str], Any]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Run it in a folder with chat.yaml, a model and prompts.jsonl."""
    monkeypatch.chdir(tmp_path)
    Path("chat.yaml").write_text(yaml.safe_dump(minimal()))
    Path("config.json").write_text('{"vocab_size": 600}')
    Path("prompts.jsonl").write_text('{"prompt": "hello"}\n')
    env = {"COLUMNS": "200", "TERM": "dumb"}
    return lambda line: CliRunner().invoke(app, ["bench", *shlex.split(line)], env=env)


@pytest.fixture
def as_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SmallServer]]:
    """A small server in place of a cluster that would be measure."""
    serving: list[AbstractContextManager[SmallServer]] = []

    def serve(*answer: Any) -> SmallServer:
        serving.append(serving_aside(*answer))
        server = serving[-1].__enter__()

        @asynccontextmanager
        async def start(*_: object) -> AsyncIterator[StartedCluster]:
            yield StartedCluster(server.base_url, 0.1, {"model": "small"})

        for module in (measure, autotune):
            monkeypatch.setattr(module, "started_cluster", start)
        return server

    yield serve
    for each in serving:
        each.__exit__(None, None, None)


def test_examples_hold() -> None:
    for module in (bench_common, bench_serve, measure):
        assert doctest.testmod(module).failed == 0


def test_serve_prints_and_writes_what_clients_saw(bench: Bench) -> None:
    with serving_aside() as server:
        result = bench(
            f"{SERVE} --base-url {server.base_url}/v1 --ignore-eos --temperature 0.5 "
            "--max-concurrency 2 --goodput ttft:60000,tpot:60000 --save-result --result-dir new "
            "--result-filename a.json --plot a.svg"
        )

    assert result.exit_code == 0, result.output
    assert "Successful requests:                     3" in result.output
    written = json.loads(Path("new/a.json").read_text())
    fields = ("model_id", "completed", "max_concurrency", "request_rate")
    assert [written[name] for name in fields] == ["small", 3, 2, "inf"]
    assert written["request_goodput"] == pytest.approx(written["request_throughput"])
    assert "SLO: 60000 ms" in Path("a.svg").read_text()
    assert json.loads(Path("a.svg.json").read_text())["ttft"]["within_slo_ratio"] == 1.0
    # none twice, the warm-up's neither
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 4
    sent = {(body["ignore_eos"], body["temperature"], body["max_tokens"]) for body in server.bodies}
    assert sent == {(True, 0.5, 2)}


def test_serve_sends_text_to_a_chat(bench: Bench) -> None:
    with serving_aside() as server:
        result = bench(
            f"{SERVE} --base-url {server.base_url} --model mine --request-rate 500 "
            "--endpoint /v1/chat/completions --dataset-name custom --dataset-path prompts.jsonl"
        )

    assert result.exit_code == 0, result.output
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert server.bodies[0]["model"] == "mine"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--num-warmups 0", "failed: error event: the engine died"),
        ("", "error: the first request failed: error event: the engine died"),
    ],
)
def test_serve_with_a_failure_ends_with_1_and_the_reason(
    bench: Bench, option: str, message: str
) -> None:
    with serving_aside(lambda body: events({"error": "the engine died"})) as server:
        result = bench(f"{SERVE} --base-url {server.base_url} {option}")

    assert result.exit_code == 1
    assert message in result.output


def test_serve_gives_up_an_answer_after_its_time_limit(bench: Bench) -> None:
    timed_out = threading.Event()

    def never(body: dict[str, Any]) -> bytes:
        timed_out.wait(60)
        return b""

    with serving_aside(never) as server:
        limits = "--num-warmups 0 --num-prompts 1 --request-timeout 0.2"
        result = bench(f"{SERVE} --base-url {server.base_url} {limits}")
        timed_out.set()

    assert result.exit_code == 1
    assert "failed: no complete answer in 0.2 s" in result.output


def test_latency_times_batches_of_other_prompts(
    bench: Bench, as_cluster: Callable[..., SmallServer]
) -> None:
    server = as_cluster()
    result = bench(
        f"latency chat.yaml --model-path . {SHORT} --batch-size 2 --num-iters 2 "
        "--num-iters-warmup 1 --output-json l.json --plot l.svg"
    )

    assert result.exit_code == 0, result.output
    assert len(json.loads(Path("l.json").read_text())["latencies"]) == 2
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 2 * 3
    assert "Avg latency: " in result.output
    assert json.loads(Path("l.svg.json").read_text())["p50_seconds"] > 0


def test_throughput_sends_all_at_once(bench: Bench, as_cluster: Callable[..., SmallServer]) -> None:
    as_cluster()
    result = bench(
        f"throughput chat.yaml --model-path . {SHORT} --num-prompts 5 --output-json t.json"
    )

    assert result.exit_code == 0, result.output
    written = json.loads(Path("t.json").read_text())
    assert (written["num_requests"], written["total_num_tokens"]) == (5, 5 * (8 + 2))


def test_throughput_takes_prompts_of_a_file(
    bench: Bench, as_cluster: Callable[..., SmallServer]
) -> None:
    server = as_cluster()
    result = bench(
        "throughput chat.yaml --model-path . --dataset-name custom --dataset-path prompts.jsonl "
        "--output-len 2 --num-prompts 2"
    )

    assert result.exit_code == 0, result.output
    assert server.bodies[-1]["prompt"] == "hello"


def test_failed_request_ends_a_measurement(
    bench: Bench, as_cluster: Callable[..., SmallServer]
) -> None:
    as_cluster(lambda body: events({"error": "the engine died"}))
    result = bench(f"latency chat.yaml --model-path . {SHORT}")

    assert result.exit_code == 1
    assert "8 of 8 requests failed, the first: error event: the engine died" in result.output


def test_result_that_cannot_be_written_is_reported(
    bench: Bench, as_cluster: Callable[..., SmallServer]
) -> None:
    as_cluster()
    out = "--num-prompts 1 --output-json chat.yaml/t.json"
    result = bench(f"throughput chat.yaml --model-path . {SHORT} {out}")

    assert result.exit_code == 1
    assert "cannot be written" in result.output


def test_autotune_prints_the_section_to_paste(
    bench: Bench, as_cluster: Callable[..., SmallServer]
) -> None:
    as_cluster()
    result = bench(
        f"autotune chat.yaml --model-path . {SHORT} --ttft-p90 60000 --itl-p99 60000 "
        "--num-prompts 2 --request-rate 500 --max-trials 2 --plot t.png"
    )

    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout) == {
        "spec": {"engine": {"maxBatchedTokens": 256, "maxSequences": 64, "scheduler": "continuous"}}
    }
    assert "trial 2: " in result.stderr
    assert "REQUESTS/S  TTFT P90 MS" in result.stderr
    assert len(json.loads(Path("t.png.json").read_text())["trials"]) == 2


@pytest.mark.parametrize(
    "command", ["serve", *(f"{name} chat.yaml {SHORT}" for name in ("latency", "throughput"))]
)
def test_plot_that_cannot_be_drawn_is_refused_before_the_load(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    wrong = bench(f"{command} --plot a.pdf")
    monkeypatch.setattr("pdctl.figures.find_spec", lambda name: None)
    missing = bench(f"{command} --plot a.png")

    assert (wrong.exit_code, missing.exit_code) == (2, 1)
    assert "--plot: a.pdf is no picture" in wrong.stderr
    assert "pip install matplotlib, or go without --plot" in missing.stderr


@pytest.mark.processes
async def test_cluster_that_does_not_start_is_an_error_with_its_output(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("kind: PDCluster\nspec: {}\n")
    with pytest.raises(StartError, match=r"(?s)did not start:.*error: "):
        async with started_cluster(tmp_path / "bad.yaml", tmp_path):
            pass
