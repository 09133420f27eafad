"""A router between clients and workers: the same tokens without an engine, and honest answers while no decode worker is there."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdcluster_operator.cli.main import app
from pdcluster_worker.dispatch.journey import LIFETIME
from tests.reference import Reference
from tests.system.client import body
from tests.system.cluster import Pair
from tests.system.prompts import Prompts
from tests.system.worker_process import WorkerProcess


@pytest.fixture(scope="module")
def router_worker(pair_cluster: Pair) -> Iterator[WorkerProcess]:
    worker = pair_cluster.cluster.add_worker("router", "pair-router-0")
    yield worker
    worker.terminate()
    try:
        assert worker.wait_end() == 0
        assert not worker.unhandled_errors()
    finally:
        worker.close()
        del pair_cluster.cluster.workers[worker.name]


@pytest.fixture
def router(router_worker: WorkerProcess, pair: Pair) -> WorkerProcess:
    """A router beside a pair, all ready, that knows the decode worker."""
    router_worker.wait_for(lambda: _num_decodes(router_worker) == 1, "the router knows the decode worker")
    return router_worker


def _num_decodes(router: WorkerProcess) -> float:
    return router.metrics().value("peers", role="decode", state="ready")


@pytest.mark.parametrize("mode", ["local", "remote"])
def test_router_streams_the_tokens_of_a_decode_worker(router: WorkerProcess, prompts: Prompts, reference: Reference, mode: str) -> None:
    prompt = prompts(70)

    answer = router.client.complete(prompt, mode, max_tokens=8)

    reference.check(prompt, answer.tokens)
    assert (len(answer.tokens), answer.prefill) == (8, mode)


def test_router_says_why_a_request_went_where_it_went(router: WorkerProcess, pair: Pair, prompts: Prompts) -> None:
    reply = router.client.post(body(prompts(70), "remote"), headers={"x-pdcluster-route": "1"})
    route = reply.headers["x-pdcluster-route"]

    assert f"credit at={pair.decode.name} peer={pair.prefill.name} waited_seconds=" in route
    assert route.endswith("; prefill=remote")
    for url in (str(router.client.http.base_url), str(pair.decode.client.http.base_url), str(pair.prefill.client.http.base_url)):
        shown = CliRunner().invoke(app, ["why", "--request", reply.json()["id"], "--url", url])
        words = shown.output.split()
        assert (shown.exit_code, [name for name in LIFETIME if name in words]) == (0, _seen_at(url, pair)), shown.output


def _seen_at(url: str, pair: Pair) -> list[str]:
    """What a prefill worker sees ends with the transfer; the others see all of it."""
    return list(LIFETIME[:5] if url == str(pair.prefill.client.http.base_url) else LIFETIME)


def test_router_has_no_engine_and_no_torch(router: WorkerProcess) -> None:
    maps = Path(f"/proc/{router.process.pid}/maps").read_text()

    assert "libtorch" not in maps
    assert (router.record["role"], router.record["kv_address"], router.record["device"]) == ("router", "", None)


def test_router_keeps_models_listed_and_says_why_without_decode_workers(router: WorkerProcess, pair: Pair, prompts: Prompts) -> None:
    with pair.cluster.drained_by_command(pair.decode.name):
        router.wait_for(lambda: _has_no_decode(router), "the router sees that the decode worker drains")
        response = router.client.post(body(prompts(8)))

        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        assert response.json()["error"]["code"] == "no_decode_worker"
        assert f"{pair.decode.name} is dra" in response.json()["error"]["message"]
        assert router.client.http.get("/v1/models").json()["data"][0]["max_model_len"] > 0
        assert router.metrics().value("request_rejected_total", reason="no_decode_worker") == 1

        router.take_policy({"admission": {"workerWaitSeconds": 60}})
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(router.client.post, body(prompts(8)))
            pair.cluster.command(pair.decode.name, drain=False)
            assert waiting.result().status_code == 200


def _has_no_decode(router: WorkerProcess) -> bool:
    reason: str | None = router.client.http.get("/ready").json()["reason"]
    return reason is not None
