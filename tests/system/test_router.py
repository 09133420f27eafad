"""A router between clients and workers: the same tokens without an engine, and honest answers while
no decode worker is there.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdcluster_worker.tracing.request_trace import LIFETIME
from tests.otlp_collector import Collector, Span
from tests.system.client import body
from tests.system.cluster import NewCluster, Pair
from tests.system.pdctl import pdctl
from tests.system.worker_process import WorkerProcess


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def pair(open_cluster: NewCluster, collector: Collector) -> Iterator[Pair]:
    with open_cluster("routed") as cluster:
        workers = [
            cluster.add_worker(role, f"routed-{role}-0", start=False)
            for role in ("prefill", "decode", "router")
        ]
        for worker in workers:
            worker.environment = collector.environment(
                "grpc" if worker is workers[1] else "http/protobuf"
            )
            worker.start()
        cluster.wait_ready()
        yield Pair(cluster, *workers[:2])
        workers[2].terminate()
        assert workers[2].wait_end() == 0
        cluster.wait_settled()


@pytest.fixture
def router(pair: Pair) -> WorkerProcess:
    router = pair.cluster.workers["routed-router-0"]
    router.wait_for(lambda: _num_decodes(router) == 1, "the router knows the decode worker")
    return router


def _num_decodes(router: WorkerProcess) -> float:
    return router.metrics().value("peers", role="decode", state="ready")


@pytest.mark.parametrize("mode", ["local", "remote"])
def test_router_streams_the_tokens_of_a_decode_worker(router, prompts, reference, mode):
    prompt = prompts(70)

    answer = router.client.complete(prompt, mode, max_tokens=8)

    reference.check(prompt, answer.tokens)
    assert (len(answer.tokens), answer.prefill) == (8, mode)


def test_router_says_why_a_request_went_where_it_went(router, pair, prompts):
    reply = router.client.post(body(prompts(70), "remote"), headers={"x-pdcluster-route": "1"})
    route = reply.headers["x-pdcluster-route"]

    assert f"credit at={pair.decode.name} peer={pair.prefill.name} waited_seconds=" in route
    assert route.endswith("; prefill=remote")
    for url in (
        str(router.client.http.base_url),
        str(pair.decode.client.http.base_url),
        str(pair.prefill.client.http.base_url),
    ):
        shown = pdctl("why", "--request", reply.json()["id"], "--url", url)
        words = shown.output.split()
        assert (shown.exit_code, [name for name in LIFETIME if name in words]) == (
            0,
            _seen_at(url, pair),
        ), shown.output


def _seen_at(url: str, pair: Pair) -> list[str]:
    """Events seen by a worker: on a prefill worker they end with the transfer; the
    others see all.
    """
    return list(LIFETIME[:5] if url == str(pair.prefill.client.http.base_url) else LIFETIME)


def test_request_is_one_trace_over_all_its_workers(router, pair, prompts, collector):
    trace_id, client_id = 32 * "7", 16 * "b"
    headers = {"traceparent": f"00-{trace_id}-{client_id}-01"}
    assert router.client.post(body(prompts(70), "remote"), headers=headers).status_code == 200

    def requests() -> dict[str, Span]:
        return {
            span.worker: span
            for span in collector.of_trace(trace_id)
            if span.name.startswith("request")
        }

    router.wait_for(lambda: len(requests()) == 3, lambda: f"only of {list(requests())}")
    ingress, decode, prefill = (
        requests()[worker.name] for worker in (router, pair.decode, pair.prefill)
    )
    assert (ingress.protocol, decode.protocol, prefill.protocol) == (
        "http/protobuf",
        "grpc",
        "http/protobuf",
    )
    assert (ingress.parent_id, decode.parent_id, prefill.parent_id) == (
        client_id,
        ingress.span_id,
        decode.span_id,
    )
    lifetime = [(name, time) for name, time, _ in decode.events if name in LIFETIME]
    assert [name for name, _ in lifetime] == list(LIFETIME)  # [D1]
    assert [time for _, time in lifetime] == sorted(time for _, time in lifetime)
    below = {span.name for span in collector.of_trace(trace_id) if span.parent_id == decode.span_id}
    assert {"credit wait", "prefill", "transfer", "first step", "decode"} <= below
    assert "decision" in {
        span.name for span in collector.of_trace(trace_id) if span.parent_id == ingress.span_id
    }


def test_router_has_no_engine_and_no_torch(router):
    maps = Path(f"/proc/{router.process.pid}/maps").read_text()

    assert "libtorch" not in maps
    assert (router.record["role"], router.record["kv_address"], router.record["device"]) == (
        "router",
        "",
        None,
    )


def test_router_keeps_models_listed_and_says_why_without_decode_workers(router, pair, prompts):
    with pair.cluster.drained_by_command(pair.decode.name):
        router.wait_for(
            lambda: _has_no_decode(router), "the router sees that the decode worker drains"
        )
        response = router.client.post(body(prompts(8)))

        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        assert response.json()["error"]["code"] == "no_decode_worker"
        assert f"{pair.decode.name} is dra" in response.json()["error"]["message"]
        assert router.client.http.get("/v1/models").json()["data"][0]["max_model_len"] > 0
        assert router.metrics().value("request_rejected_total", reason="no_decode_worker") == 1

        router.take_policy({"admission": {"workerWaitSeconds": 60}})
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(router.client.post, body(prompts(8)))
            router.wait_for(
                lambda: router.metrics().value("held_requests") == 1, "the router holds the request"
            )
            pair.cluster.command(pair.decode.name, drain=False)
            assert waiting.result().status_code == 200
        assert router.metrics().value("held_requests") == 0


def _has_no_decode(router: WorkerProcess) -> bool:
    reason: str | None = router.client.http.get("/ready").json()["reason"]
    return reason is not None
