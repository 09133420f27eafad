"""Workers with less time than their streams take, as on a spot node: a stream that came over
another worker moves, and one of the worker's own clients ends with an error event.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.system.cluster import Cluster, NewCluster
from tests.system.worker_process import WorkerProcess

LONG = 1500  # tokens: more than the seconds that a worker has left
MOVED = 600
TEXT = "this worker was stopped, and has no time left for this answer: send it again"
ENDED = {"message": TEXT, "type": "server_error", "param": None, "code": "draining"}


@dataclass(frozen=True)
class Spot:
    """Two decode workers behind a router."""

    cluster: Cluster
    router: WorkerProcess
    decodes: tuple[WorkerProcess, WorkerProcess]


@pytest.fixture(scope="module")
def spot_cluster(open_cluster: NewCluster) -> Iterator[Spot]:
    with open_cluster("spot") as cluster:
        decodes = (cluster.add_worker("decode", "spot-0"), cluster.add_worker("decode", "spot-1"))
        yield Spot(cluster, cluster.add_worker("router", "spot-router"), decodes)


@pytest.fixture
def spot(spot_cluster: Spot) -> Iterator[Spot]:
    spot_cluster.cluster.heal()
    router = spot_cluster.router
    router.wait_for(lambda: router.num_decode_peers() == 2, "the router knows both")
    for decode in spot_cluster.decodes:
        decode.let_engines_yield()
    yield spot_cluster
    spot_cluster.cluster.wait_settled()


def send_drain(spot: Spot, worker: WorkerProcess, grace_seconds: int) -> None:
    """As the operator does it for a pod that ends."""
    key = f"/pdcluster/test/{spot.cluster.name}/commands/{worker.name}"
    spot.cluster.etcd.put(key, f'{{"graceSeconds": {grace_seconds}}}')


def test_streams_of_other_workers_clients_move_and_own_ones_end_with_an_error(
    spot, prompts, reference
):
    router, prompt = spot.router, prompts(100)
    before = router.metrics()
    with router.client.stream(prompt, max_tokens=MOVED) as moves:
        moves.read_tokens(2)
        (goes,) = (d for d in spot.decodes if d.metrics().value("num_requests_running") > 0)
        with goes.client.stream(prompts(50), "local", max_tokens=LONG) as stays:
            stays.read_tokens(2)
            send_drain(spot, goes, grace_seconds=3)
            router.wait_growth(before, "request_moves_total", 1, reason="draining", outcome="moved")
            goes.terminate()
            stays.read_all()
        assert goes.wait_end() == 0
        tokens = moves.read_all()
    spot.cluster.command(goes.name, drain=False)

    assert (stays.done, stays.error) == (False, ENDED)
    assert (moves.done, moves.error, len(tokens)) == (True, None, MOVED)
    reference.check(prompt, tokens[:200])
    assert spot.cluster.record(goes.name) is None


@pytest.mark.parametrize("role", ["decode", "router"])
def test_a_worker_ends_its_streams_by_its_own_grace_period_without_an_operator(spot, prompts, role):
    worker = spot.router if role == "router" else spot.decodes[0]
    worker.terminate()
    assert worker.wait_end() == 0
    worker.start(PDCLUSTER_GRACE_SECONDS="3")
    try:
        worker.wait_ready()
        worker.wait_for(lambda: worker.num_decode_peers() >= 1, "it knows decode workers")
        with worker.client.stream(prompts(50), max_tokens=LONG) as stream:
            stream.read_tokens(2)
            worker.terminate()
            stream.read_all()
        assert worker.wait_end() == 0
    finally:
        if not worker.is_alive:
            worker.start()
            worker.wait_ready()

    assert (stream.done, stream.error) == (False, ENDED)
    assert "no time left before this process is killed, answers ended=1" in worker.log.read_text()


def test_a_relayed_stream_ends_with_the_error_where_its_router_has_no_time(spot, prompts):
    router = spot.router
    router.terminate()
    assert router.wait_end() == 0
    router.write_policy({"relaying": {"enabled": True}})
    router.start(PDCLUSTER_GRACE_SECONDS="3")
    try:
        router.wait_ready()
        router.wait_for(lambda: router.num_decode_peers() >= 1, "it knows decode workers")
        with router.client.stream(prompts(50), max_tokens=LONG) as stream:
            stream.read_tokens(2)
            assert router.metrics().value("relaying_requests") == 1
            router.terminate()
            stream.read_all()
        assert router.wait_end() == 0
    finally:
        router.write_policy({})
        router.start()
        router.wait_ready()

    assert (stream.done, stream.error) == (False, ENDED)
    assert "no time left before this process is killed, answers ended=1" in router.log.read_text()


def test_a_request_that_runs_for_another_workers_client_goes_on_when_its_worker_had_no_time(
    spot, prompts, reference
):
    """It is lost to its router, and computed again."""
    router, prompt = spot.router, prompts(60)
    router.take_policy({"moving": {"maxMoves": 1}})
    with router.client.stream(prompt, max_tokens=200) as stream:
        stream.read_tokens(2)
        (goes,) = (d for d in spot.decodes if d.metrics().value("num_requests_running") > 0)
        with goes.engine_stopped():  # it cannot hand over
            send_drain(spot, goes, grace_seconds=3)
            goes.terminate()
            assert goes.wait_end() == 0
        tokens = stream.read_all()
    spot.cluster.command(goes.name, drain=False)
    router.take_policy({})

    assert (stream.done, len(tokens)) == (True, 200)
    reference.check(prompt, tokens[:200])
