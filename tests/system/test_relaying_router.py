"""A router that relays, in front of real workers: the same answers as the workers' own, remote
prefill, another worker for what a lost one had not begun, and drains that lose nothing.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.system.client import body
from tests.system.cluster import Cluster, NewCluster
from tests.system.worker_process import WorkerProcess

POLICY = {"relaying": {"enabled": True, "policy": "roundRobin"}}


@pytest.fixture(scope="module")
def cluster(open_cluster: NewCluster) -> Iterator[Cluster]:
    with open_cluster("relayed") as cluster:
        for role, number in (("prefill", 0), ("decode", 0), ("decode", 1), ("router", 0)):
            worker = cluster.add_worker(role, f"relayed-{role}-{number}", start=False)
            worker.write_policy(POLICY)
            worker.start()
        cluster.wait_ready()
        yield cluster


@pytest.fixture
def router(cluster: Cluster) -> WorkerProcess:
    router = cluster.workers["relayed-router-0"]
    if not router.is_alive:
        router.start()
    cluster.heal()
    router.wait_for(
        lambda: router.metrics().value("peers", role="decode", state="ready") == 2,
        "the router knows the decode workers",
    )
    return router


def decodes(cluster: Cluster) -> list[WorkerProcess]:
    return [cluster.workers[f"relayed-decode-{number}"] for number in (0, 1)]


def num_retries(router: WorkerProcess) -> float:
    return sum(router.metrics().by_label("relay_retries_total", "reason").values())


def relayed(router: WorkerProcess) -> float:
    return router.metrics().value("relayed_requests_total", outcome="answered")


@pytest.mark.parametrize("mode", ["local", "remote"])
def test_relayed_answers_are_those_of_the_worker(router, prompts, reference, mode):
    prompt, before = prompts(70), relayed(router)

    answer = router.client.complete(prompt, mode, max_tokens=8)

    reference.check(prompt, answer.tokens)
    assert (len(answer.tokens), answer.prefill) == (8, mode)
    with router.client.stream(prompt, mode, max_tokens=8) as stream:
        assert stream.read_all() == answer.tokens
    assert relayed(router) == before + 2


def test_route_and_ids_are_the_workers(router, cluster, prompts):
    reply = router.client.post(body(prompts(70), "remote"), headers={"x-pdcluster-route": "1"})

    assert "peer=relayed-prefill-0" in reply.headers["x-pdcluster-route"]
    assert reply.headers["x-request-id"] in reply.json()["id"]
    assert "connection" not in reply.headers


def test_a_worker_that_is_killed_has_its_requests_answered_elsewhere(router, cluster, prompts):
    one, other = decodes(cluster)
    os.kill(one.process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        requested = [pool.submit(router.client.post, body(prompts(8))) for _ in range(4)]
        router.wait_for(
            lambda: sum(each.done() for each in requested) == 2 or num_retries(router) > 0,
            "the other worker has answered, or the stopped one is given up",
        )
        one.kill()
        assert [each.result().status_code for each in requested] == [200] * 4
    assert num_retries(router) > 0
    assert other.is_alive


def test_a_drained_worker_and_a_drained_router_lose_nothing(router, cluster, prompts):
    one, _ = decodes(cluster)
    with ThreadPoolExecutor(8) as pool:
        requested = [
            pool.submit(router.client.post, body(prompts(8), max_tokens=24)) for _ in range(8)
        ]
        with cluster.drained_by_command(one.name):
            requested += [pool.submit(router.client.post, body(prompts(8))) for _ in range(4)]
            assert [each.result().status_code for each in requested] == [200] * 12
        last = pool.submit(router.client.post, body(prompts(8), max_tokens=24))
        router.wait_for(
            lambda: last.done() or router.metrics().value("relaying_requests") > 0,
            "the last request runs",
        )
        router.terminate()
        assert last.result().status_code == 200
    assert router.wait_end() == 0


def test_without_decode_workers_the_router_says_so(router, cluster, prompts):
    one, other = decodes(cluster)
    with cluster.drained_by_command(one.name), cluster.drained_by_command(other.name):
        router.wait_for(
            lambda: router.client.http.get("/ready").json()["reason"] is not None,
            "the router sees that both drain",
        )
        response = router.client.post(body(prompts(8)))
        assert response.json()["error"]["code"] == "no_decode_worker"
        assert router.client.http.get("/v1/models").status_code == 200
    router.wait_for(
        lambda: router.client.http.get("/ready").json()["reason"] is None, "they serve again"
    )
    assert router.client.post(body(prompts(8))).status_code == 200
