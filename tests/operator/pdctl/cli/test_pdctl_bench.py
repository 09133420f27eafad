"""`pdctl bench`: what it prints and writes, and which input it refuses."""

import doctest
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pdcluster_api.errors import StartError
from pdctl.bench import measure, started
from pdctl.bench.started import StartedCluster, started_cluster
from pdctl.cli import bench_common, bench_serve
from pdctl.cli.main import app
from tests.operator.pdctl.bench.small_servers import SmallServer, events, serving_aside
from tests.schema.object_cases import at, minimal

SERVE = ("serve", "--num-prompts", "3", "--input-len", "8", "--output-len", "2")


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture
def server() -> Iterator[SmallServer]:
    with serving_aside() as found:
        yield found


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    """A PDCluster's file and its model's folder, as arguments."""
    document = minimal()
    at("spec.engine", {"maxModelLen": 64})(document)
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "config.json").write_text('{"vocab_size": 600}')
    return (str(tmp_path / "chat.yaml"), "--model-path", str(tmp_path))


@pytest.fixture
def as_cluster(server: SmallServer, monkeypatch: pytest.MonkeyPatch) -> SmallServer:
    """The small server in place of a cluster that would be started."""

    @asynccontextmanager
    async def start(*_: object) -> AsyncIterator[StartedCluster]:
        yield StartedCluster(server.base_url, 0.1, {"model": "small"})

    monkeypatch.setattr(measure, "started_cluster", start)
    return server


def test_examples_hold() -> None:
    for module in (bench_common, bench_serve, started):
        assert doctest.testmod(module).failed == 0


def test_serve_prints_and_writes_what_clients_saw(server: SmallServer, tmp_path: Path) -> None:
    saved = (
        "--save-result",
        "--result-dir",
        str(tmp_path / "new"),
        "--result-filename",
        "a.json",
        "--plot",
        str(tmp_path / "a.svg"),
    )
    load = (
        "--ignore-eos",
        "--temperature",
        "0.5",
        "--max-concurrency",
        "2",
        "--goodput",
        "ttft:60000,tpot:60000",
    )
    result = bench(*SERVE, "--base-url", server.base_url + "/v1", *load, *saved)

    assert result.exit_code == 0, result.output
    assert "Successful requests:                     3" in result.output
    written = json.loads((tmp_path / "new" / "a.json").read_text())
    assert (
        written["model_id"],
        written["completed"],
        written["max_concurrency"],
        written["request_rate"],
    ) == ("small", 3, 2, "inf")
    assert written["request_goodput"] == pytest.approx(written["request_throughput"])
    assert "TTFT" in (tmp_path / "a.svg").read_text()
    # none twice, the warm-up's neither
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 4
    assert {
        (body["ignore_eos"], body["temperature"], body["max_tokens"]) for body in server.bodies
    } == {(True, 0.5, 2)}


def test_serve_sends_text_to_a_chat(server: SmallServer, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    chat = (
        "--endpoint",
        "/v1/chat/completions",
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(tmp_path / "prompts.jsonl"),
    )
    result = bench(
        *SERVE, "--base-url", server.base_url, "--model", "mine", "--request-rate", "500", *chat
    )

    assert result.exit_code == 0, result.output
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert server.bodies[0]["model"] == "mine"


def test_serve_with_a_failure_ends_with_1_and_says_why() -> None:
    answers: Iterator[bytes] = iter([])

    def answer(body: dict[str, Any]) -> bytes:
        return next(answers, events({"error": "the engine died"}))

    with serving_aside(answer) as server:
        result = bench(*SERVE, "--base-url", server.base_url, "--num-warmups", "0")
        first = bench(*SERVE, "--base-url", server.base_url)

    assert result.exit_code == first.exit_code == 1
    assert "failed: error event: the engine died" in result.output
    assert "error: the first request failed: error event: the engine died" in first.output


def test_serve_gives_up_an_answer_after_the_time_that_it_was_given() -> None:
    asked_out = threading.Event()

    def never(body: dict[str, Any]) -> bytes:
        asked_out.wait(60)
        return b""

    with serving_aside(never) as server:
        options = ("--num-warmups", "0", "--num-prompts", "1", "--request-timeout", "0.2")
        result = bench(*SERVE, "--base-url", server.base_url, *options)
        asked_out.set()

    assert result.exit_code == 1
    assert "failed: no complete answer in 0.2 s" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--request-timeout", "0"), "--request-timeout"),
        (("--request-rate", "0"), "--request-rate: is 0; give requests a second above 0, or inf"),
        (("--endpoint", "/v2"), "--endpoint: is /v2; give /v1/completions or /v1/chat/completions"),
        (
            ("--endpoint", "/v1/chat/completions"),
            "takes no token ids, which random prompts are; use --dataset-name",
        ),
        (("--goodput", "ttft"), "--goodput: 'ttft' is no limit; write ttft:MS"),
        (("--goodput", "ttft:-1"), "--goodput: 'ttft:-1' is no limit"),
        (
            ("--metric-percentiles", "50,101"),
            "--metric-percentiles: '50,101'; write numbers from 0 to 100",
        ),
        (("--percentile-metrics", "ttfb"), "--percentile-metrics: no 'ttfb'; write names of ttft"),
        (("--dataset-name", "custom"), "--dataset-path: not given; give the file"),
        (("--num-prompts", "0"), "--num-prompts"),
        (("--dataset-name", "other"), "--dataset-name"),
    ],
)
def test_serve_refuses_wrong_options(arguments: tuple[str, ...], message: str) -> None:
    result = bench("serve", *arguments)

    assert result.exit_code == 2
    assert message in result.output


def test_serve_without_a_server_says_what_to_correct() -> None:
    with serving_aside() as gone:
        base_url = gone.base_url
    result = bench(*SERVE, "--base-url", base_url)

    assert result.exit_code == 1
    assert "start the server, or correct --base-url" in result.output


def test_latency_times_batches_of_other_prompts(
    as_cluster: SmallServer, files: tuple[str, ...], tmp_path: Path
) -> None:
    sizes = (
        "--input-len",
        "8",
        "--output-len",
        "2",
        "--batch-size",
        "2",
        "--num-iters",
        "2",
        "--num-iters-warmup",
        "1",
    )
    out = ("--output-json", str(tmp_path / "l.json"), "--plot", str(tmp_path / "l.svg"))
    result = bench("latency", *files, *sizes, *out)

    assert result.exit_code == 0, result.output
    assert len(json.loads((tmp_path / "l.json").read_text())["latencies"]) == 2
    assert len({tuple(body["prompt"]) for body in as_cluster.bodies}) == 2 * 3
    assert "Avg latency: " in result.output
    assert (tmp_path / "l.svg").read_text().startswith("<svg")


def test_throughput_sends_all_at_once(
    as_cluster: SmallServer, files: tuple[str, ...], tmp_path: Path
) -> None:
    out = ("--output-json", str(tmp_path / "t.json"), "--plot", str(tmp_path / "t.svg"))
    result = bench(
        "throughput", *files, "--input-len", "8", "--output-len", "2", "--num-prompts", "5", *out
    )

    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "t.json").read_text())
    assert (written["num_requests"], written["total_num_tokens"]) == (5, 5 * (8 + 2))


def test_throughput_takes_prompts_of_a_file(
    as_cluster: SmallServer, files: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    custom = (
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(tmp_path / "prompts.jsonl"),
        "--output-len",
        "2",
    )
    result = bench("throughput", *files, *custom, "--num-prompts", "2")

    assert result.exit_code == 0, result.output
    assert as_cluster.bodies[-1]["prompt"] == "hello"


@pytest.mark.parametrize("command", ["latency", "throughput", "autotune"])
def test_requests_that_the_model_has_no_room_for_are_refused(
    command: str, files: tuple[str, ...]
) -> None:
    limits = ("--ttft-p90", "1000", "--itl-p99", "100") if command == "autotune" else ()
    result = bench(command, *files, "--input-len", "60", "--output-len", "5", *limits)

    assert result.exit_code == 2
    assert (
        "--input-len and --output-len: together 65 tokens, and spec.engine.maxModelLen is 64; "
        "lower them" in result.output
    )


def test_failed_request_ends_a_measurement(
    files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_aside(lambda body: events({"error": "the engine died"})) as server:

        @asynccontextmanager
        async def start(*_: object) -> AsyncIterator[StartedCluster]:
            yield StartedCluster(server.base_url, 0.1, {"model": "small"})

        monkeypatch.setattr(measure, "started_cluster", start)
        result = bench("latency", *files, "--input-len", "8", "--output-len", "2")

    assert result.exit_code == 1
    assert "8 of 8 requests failed, the first: error event: the engine died" in result.output


def test_model_without_a_vocabulary_is_refused(files: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = bench("latency", *files, "--input-len", "8", "--output-len", "2")

    assert result.exit_code == 2
    assert "has no vocab_size; give the folder of a model" in result.output


def test_result_that_cannot_be_written_says_so(
    as_cluster: SmallServer, files: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    out = ("--output-json", str(tmp_path / "file" / "t.json"))
    result = bench(
        "throughput", *files, "--input-len", "8", "--output-len", "2", "--num-prompts", "1", *out
    )

    assert result.exit_code == 1
    assert "cannot be written" in result.output


def test_autotune_prints_the_section_to_paste(
    as_cluster: SmallServer, files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdctl.bench import autotune

    monkeypatch.setattr(autotune, "started_cluster", measure.started_cluster)
    load = (
        "--input-len",
        "8",
        "--output-len",
        "2",
        "--num-prompts",
        "2",
        "--request-rate",
        "500",
        "--max-trials",
        "2",
    )
    result = bench("autotune", *files, "--ttft-p90", "60000", "--itl-p99", "60000", *load)

    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout) == {
        "spec": {"engine": {"maxBatchedTokens": 256, "maxSequences": 64, "scheduler": "continuous"}}
    }
    assert "trial 2: " in result.stderr


@pytest.mark.processes
async def test_cluster_that_does_not_start_is_an_error_with_its_output(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("kind: PDCluster\nspec: {}\n")
    with pytest.raises(StartError, match=r"(?s)did not start:.*error: "):
        async with started_cluster(tmp_path / "bad.yaml", tmp_path):
            pass
