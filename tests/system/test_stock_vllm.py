"""One prefill and one decode worker around real, stock vLLM servers, KV by NIXL on this CPU, of
each version that is installed.

They take minutes and a large environment, so they run where PDCLUSTER_TEST_VLLM is set.
What vLLM itself promises is not tested again: these hold that a version of it does
what `stock` takes for granted.
"""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.otlp_collector import Collector
from tests.reference import Reference
from tests.system.client import Answer, body
from tests.system.cluster import NewCluster, Pair
from tests.system.stock_vllm import (
    LEASE_SECONDS,
    NOT_ASKED,
    START_SECONDS,
    installed,
    make_wide_model,
    stock_engine,
    wait_ready,
)
from tests.system.verifying import verified
from tests.system.worker_process import END_SECONDS, WorkerProcess

pytestmark = [
    pytest.mark.skipif(not installed(), reason=NOT_ASKED),
    pytest.mark.timeout(2 * START_SECONDS),
]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module", params=[*installed()])
def stock_pair(
    open_cluster: NewCluster,
    wide_model: Path,
    collector: Collector,
    request: pytest.FixtureRequest,
) -> Iterator[Pair]:
    folder = installed()[request.param]
    with open_cluster(f"stock-{request.param.replace('.', '-')}") as cluster:
        cluster.lease_seconds = LEASE_SECONDS
        workers = []
        for role in ("prefill", "decode"):
            worker = cluster.add_worker(role, f"stock-{role}-0", model=wide_model, start=False)
            sent = collector.environment()
            traces = sent["OTEL_EXPORTER_OTLP_ENDPOINT"]
            worker.settings["engine"] = stock_engine(wide_model, role, folder=folder, traces=traces)
            worker.environment |= sent
            worker.start()
            workers.append(worker)
        pair = Pair(cluster, *workers)
        wait_ready(pair)
        yield pair


def vllm_of(worker: WorkerProcess) -> psutil.Process:
    (server,) = psutil.Process(worker.engine_pid).children()
    return server


@contextlib.contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def wait_idle(worker: WorkerProcess) -> None:
    """Wait until the engine itself holds no block and runs nothing."""

    def used() -> int:
        return worker.blocks()["in_use"] + worker.blocks()["receiving"]

    worker.wait_for(lambda: used() == 0, lambda: f"{worker.name} holds {used()} blocks")


@pytest.mark.skipif(len(installed()) < 2, reason=f"of one version alone: {NOT_ASKED}")
def test_clusters_of_two_versions_serve_side_by_side(open_cluster, wide_model, prompts):
    prompt = prompts(40)
    with contextlib.ExitStack() as stack:
        workers = {}
        for version, folder in sorted(installed().items())[-2:]:
            name = f"side-{version.replace('.', '-')}"
            cluster = stack.enter_context(open_cluster(name))
            cluster.lease_seconds = LEASE_SECONDS
            worker = cluster.add_worker("mixed", name, model=wide_model, start=False)
            worker.settings["engine"] = stock_engine(wide_model, "mixed", folder=folder)
            worker.start()
            workers[version] = worker
        for version, worker in workers.items():
            worker.wait_ready(START_SECONDS)
            answer = worker.client.complete(prompt)
            device = worker.client.http.get("/version").json()["device"]

            assert device["operations"].startswith(f"vllm {version}")
            Reference(wide_model).check(prompt, answer.tokens)


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 100, 300])
def test_remote_prefill_gives_the_tokens_of_a_local_one(
    stock_pair, wide_model, prompts, num_tokens
):
    decode, prompt = stock_pair.decode, prompts(num_tokens)
    before = decode.settled_metrics()

    remote = decode.client.complete(prompt, "remote")
    local = decode.client.complete(prompt, "local")

    assert (remote.prefill, local.prefill) == ("remote", "local")
    assert remote.tokens == local.tokens
    assert remote.choices[0].finish_reason == "length"
    assert remote.usage["completion_tokens"] == len(remote.tokens) == 8
    assert remote.usage["prompt_tokens"] == num_tokens
    Reference(wide_model).check(prompt, remote.tokens)
    decode.wait_growth(before, "remote_prefill_total", 1, outcome="ok")
    decode.wait_growth(before, "generation_tokens_total", 16)
    wait_idle(stock_pair.prefill)


def test_a_seeded_draw_and_its_logprobs_do_not_depend_on_the_path(stock_pair, prompts):
    prompt, fields = prompts(70), {"temperature": 1.0, "seed": 11, "logprobs": 3}

    remote, local = (
        stock_pair.decode.client.complete(prompt, place, **fields) for place in ("remote", "local")
    )

    assert remote.tokens == local.tokens
    assert remote.choices[0].logprobs == pytest.approx(local.choices[0].logprobs, abs=1e-4)


def test_the_second_turn_hits_the_prefix_cache(stock_pair, prompts):
    prompt = prompts(200)
    first = stock_pair.decode.client.complete(prompt, "local")

    again = stock_pair.decode.client.complete([*prompt, *first.tokens, 7], "local")

    assert again.cached_tokens >= 192


def test_an_abort_reaches_the_engine(stock_pair, prompts):
    with stock_pair.decode.client.stream(prompts(64), "remote", max_tokens=900) as stream:
        stream.read_tokens(3)

    wait_idle(stock_pair.decode)
    wait_idle(stock_pair.prefill)
    assert stock_pair.decode.metrics().value("num_requests_running") == 0


def test_a_refusal_of_the_engine_is_a_400(stock_pair, prompts):
    reply = stock_pair.decode.client.post(
        body(prompts(4), structured_outputs={"regex": "(["}, max_tokens=4)
    )

    assert reply.status_code == httpx.codes.BAD_REQUEST, reply.text


def test_both_engines_spans_are_below_their_workers(stock_pair, prompts, collector):
    trace_id = "5" * 32
    headers = {"traceparent": f"00-{trace_id}-{'6' * 16}-01"}
    requested = body(prompts(120), "remote", max_tokens=4)
    decode = stock_pair.decode
    reply = decode.client.post(requested, headers=headers)
    assert reply.status_code == httpx.codes.OK, reply.text

    def parents(begin: str) -> dict[str, str]:
        """Parents of spans whose names begin so, by the worker or engine."""
        spans = [span for span in collector.of_trace(trace_id) if span.name.startswith(begin)]
        return {span.worker: span.parent_id for span in spans}

    workers = {"stock-prefill-0", "stock-decode-0"}
    engines = {"vllm-prefill": "stock-prefill-0", "vllm-decode": "stock-decode-0"}
    decode.wait_for(
        lambda: (
            (parents("llm_request").keys(), parents("request").keys()) == (engines.keys(), workers)
        ),
        lambda: str(collector.of_trace(trace_id)),
    )
    owner = {span.span_id: span.worker for span in collector.of_trace(trace_id)}
    for engine, worker in engines.items():
        assert owner[parents("llm_request")[engine]] == worker


def test_a_verified_transfer_counts_the_tokens_and_bytes_that_came(stock_pair, certificates):
    found = verified(stock_pair.decode, certificates, even_if_busy=True)

    assert found["outcome"] == "verified", found
    assert found["num_prompt_tokens"] > 0, found
    assert found["num_bytes"] > 0, found
    assert found["bytes_per_second"] > 0, found


def test_a_prefill_worker_killed_in_the_middle_costs_no_answer_and_comes_back(stock_pair, prompts):
    """Its engine computes nothing while its server is stopped, so the request is on its way."""
    prefill, decode, prompt = stock_pair.prefill, stock_pair.decode, prompts(400)
    before, answers = decode.metrics(), list[Answer]()
    asking = threading.Thread(target=lambda: answers.append(decode.client.complete(prompt, "auto")))
    with stopped(vllm_of(prefill)):
        asking.start()
        decode.wait_for(lambda: decode.blocks()["receiving"] > 0, "the request waits for its KV")
        prefill.kill()
    asking.join(END_SECONDS)

    expected = decode.client.complete(prompt, "local").tokens
    assert [answer.tokens for answer in answers] == [expected]
    decode.wait_growth(before, "remote_prefill_total", 1, outcome="failed")
    prefill.restart(wait=False)
    wait_ready(stock_pair)
    again = decode.client.complete(prompts(100), "remote")
    assert again.prefill == "remote"
    decode.wait_growth(before, "remote_prefill_total", 1, outcome="ok")


def test_a_handshake_without_an_answer_is_made_again_and_else_the_prompt_is_computed_here(
    stock_pair, prompts
):
    """The prefill engine stops between a prompt's prefill and the fetch of its KV, for longer than
    vLLM waits: through both attempts, then through the first alone.
    """
    prefill, decode = stock_pair.prefill, stock_pair.decode
    if decode.metrics().value("remote_prefill_total", outcome="ok"):
        prefill.terminate()
        prefill.wait_end()
        prefill.restart(wait=False)  # a new engine, which has no handshake behind it
        wait_ready(stock_pair)
    for num_tokens, is_answered, outcome in ((400, False, "failed"), (401, True, "ok")):
        prompt, answers = prompts(num_tokens), list[Answer]()
        asking = threading.Thread(
            target=lambda prompt=prompt, answers=answers: answers.append(
                decode.client.complete(prompt, "auto")
            )
        )
        before, decoded = prefill.metrics(), decode.metrics()
        logged = len(decode.log.read_text())
        with contextlib.ExitStack() as stack:
            with stopped(vllm_of(decode)):
                asking.start()
                prefill.wait_for(
                    lambda before=before: prefill.growth(before, "prefill_tokens_total") > 0,
                    "the prompt is computed",
                )
                stack.enter_context(stopped(*vllm_of(prefill).children(recursive=True)))
            decode.wait_for(
                lambda logged=logged: "fetching KV again" in decode.log.read_text()[logged:],
                decode.log_tail,
            )
            if not is_answered:
                asking.join(END_SECONDS)
        asking.join(END_SECONDS)

        (answer,) = answers
        assert answer.prefill == ("remote" if is_answered else "local")
        assert answer.tokens == decode.client.complete(prompt, "local").tokens
        decode.wait_growth(decoded, "remote_prefill_total", 1, outcome=outcome)


def test_an_engine_that_dies_ends_its_streams_and_its_worker(stock_pair, prompts):
    decode = stock_pair.decode
    with decode.client.stream(prompts(10), "local", max_tokens=900) as stream:
        stream.read_tokens(3)
        vllm_of(decode).kill()
        stream.read_all()

    assert stream.error is not None
    assert not stream.done
    assert decode.wait_end() == 1
    decode.restart(wait=False)
    wait_ready(stock_pair)
    assert decode.client.complete(prompts(10), "remote").prefill == "remote"


def test_a_drain_lets_a_stream_end(stock_pair, prompts):
    decode = stock_pair.decode
    with decode.client.stream(prompts(40), "remote", max_tokens=200) as stream:
        stream.read_tokens(3)
        decode.terminate()
        tokens = stream.read_all()

    assert len(tokens) == 200
    assert stream.done
    assert decode.wait_end() == 0
    decode.restart(wait=False)
    wait_ready(stock_pair)
