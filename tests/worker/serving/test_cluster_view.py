"""The cluster as its ingress worker sees it: members in each state, their load, the last hour."""

from collections.abc import AsyncIterator, Callable

import pytest
from msgspec.structs import replace

from pdcluster_worker.config.worker import Identity, TLSConfig
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.messages.peers import Hello, WorkerLoad
from pdcluster_worker.peers.client import LocalWorker
from pdcluster_worker.peers.directory import Directory
from pdcluster_worker.peers.pair_check import Refusals
from pdcluster_worker.peers.records import WorkerRecord
from pdcluster_worker.peers.tls import Credentials
from pdcluster_worker.routing.prefix_index import PrefixIndex
from pdcluster_worker.serving.cluster_view import NUM_PERIODS, ClusterView
from pdcluster_worker.serving.worker_context import WorkerContext
from tests.worker.serving.doubles import ScriptedEngine, config_of, stats, until

HELLO = Hello("engine-d0", "decode", KVGeometry(1, 8, 1, 4, "float32"), "w", "r1")


def record(pod: str, role: str, **changes: str) -> WorkerRecord:
    base = WorkerRecord(
        engine_id=f"engine-{pod}",
        pod=pod,
        grpc_address="127.0.0.1:1",
        kv_address="127.0.0.1:2",
        http_address="127.0.0.1:3",
        role=role,
        pool="p",
        state="ready",
    )
    return replace(base, **changes)


@pytest.fixture
async def directory(worker: WorkerContext, tls: TLSConfig) -> AsyncIterator[Directory]:
    """Members as the decode worker d0 knows them; none of them can be reached."""
    refusals = Refusals(worker.metrics)
    local = LocalWorker(HELLO, Credentials(tls), refusals, PrefixIndex())
    directory = Directory("d0", local, worker.metrics)
    members = [
        record("d0", "decode"),
        record("p0", "prefill"),
        record("p1", "prefill", engine_id=""),
        record("p2", "prefill", state="draining"),
        record("r0", "router"),
    ]
    directory.set_members({each.pod: each for each in members})
    yield directory
    await directory.close()


@pytest.fixture
def view(worker: WorkerContext, tls: TLSConfig, directory: Directory) -> ClusterView:
    return ClusterView(
        config_of(tls, "decode"), Identity("d0", "ns", "127.0.0.1"), worker, directory
    )


def states(view: ClusterView) -> dict[str, str]:
    return {each.pod: each.state for each in view.overview(None).workers}


async def test_members_have_the_state_that_is_seen_from_here(
    view: ClusterView, directory: Directory
) -> None:
    connecting = {"d0": "ready", "p0": "connecting", "p1": "starting", "p2": "draining"}
    assert states(view) == {**connecting, "r0": "ready"}

    peer = directory.peer("p0")
    peer.state, peer.load = "ready", WorkerLoad(state="stalled", num_waiting=3)
    seen = {each.pod: each for each in view.overview(None).workers}
    assert (seen["p0"].state, seen["p0"].figures.num_waiting) == ("stalled", 3)
    assert [seen[pod].figures for pod in ("p1", "p2", "r0")] == [None] * 3

    theirs = replace(HELLO, engine_id="engine-p0", role="prefill", weights="others")
    reason = directory._local.refusals.check(HELLO, theirs)
    peer.state = "refused"
    seen = {each.pod: each for each in view.overview(None).workers}
    assert (seen["p0"].state, seen["p0"].note) == ("refused", reason)


async def test_own_load_counts_kv_and_prefills(view: ClusterView, worker, engine) -> None:
    worker.num_prefills["remote"] += 2
    worker.num_prefills["local"] += 1
    # no free block, as of a stock engine that runs all that it may
    blocks = {"free": 30, "cached": 10, "in_use": 20, "receiving": 4}
    moved = {"bytes_sent": 5, "bytes_received": 70}
    engine.say(replace(stats(0, num_transfers=1), blocks=blocks, **moved))
    await until(lambda: worker.engines.first.client.stats is not None)
    own = view.overview("p0 is lost").workers[0].figures

    assert (own.used_blocks, own.total_blocks, own.num_transfers) == (24, 64, 1)
    assert (own.kv_bytes, own.remote_prefills, own.local_prefills) == (75, 2, 1)
    assert view.overview("p0 is lost").problem == "p0 is lost"


@pytest.fixture
def count(view: ClusterView, directory: Directory) -> Callable[..., tuple[int, int]]:
    """End a period in which p0 has these counts, and get what the period is said to have had."""

    def sample(*prefills: int, engine: str = "engine-p0") -> tuple[int, int]:
        peer = directory.peer("p0")
        if engine != peer.record.engine_id:
            members = {each.pod: each for each in directory.members()}
            directory.set_members({**members, "p0": record("p0", "prefill", engine_id=engine)})
            peer = directory.peer("p0")
        peer.state, peer.load = "lost", WorkerLoad()
        if prefills:
            peer.state = "ready"
            peer.load = WorkerLoad(remote_prefills=prefills[0], local_prefills=prefills[1])
        view.sample()
        history = view.overview(None).history
        return history.remote[-2], history.local[-2]

    return sample


async def test_the_first_period_counts_from_the_start_and_while_it_lasts(
    view: ClusterView, directory: Directory, worker: WorkerContext, engine: ScriptedEngine
) -> None:
    engine.say(stats(0))
    await until(lambda: worker.engines.first.client.stats is not None)
    peer = directory.peer("p0")
    peer.state, peer.load = "ready", WorkerLoad()  # connected, no report yet
    view.notice()
    peer.load = WorkerLoad(remote_prefills=700, local_prefills=70)
    view.notice()
    peer.load = WorkerLoad(remote_prefills=703, local_prefills=70)
    worker.num_prefills["local"] += 2
    for _ in range(2):
        history = view.overview(None).history
        assert (history.remote, history.local) == ([3], [2])
    assert history.ready == {"decode": [1], "prefill": [1], "router": [1]}

    view.sample()
    worker.num_prefills["local"] += 1
    view.notice()
    history = view.overview(None).history
    assert (history.remote, history.local) == ([3, 0], [2, 1])


async def test_the_last_hour_has_growth_only(
    view: ClusterView, count: Callable[..., tuple[int, int]]
) -> None:
    assert [count(7, 7), count(9, 7)] == [(0, 0), (2, 0)]
    assert count(1, 3, engine="restarted") == (1, 3)
    assert count(1, 3, engine="restarted") == (0, 0)
    assert view.overview(None).history.ready == {
        role: [1] * 5 for role in ("decode", "prefill", "router")
    }


async def test_a_worker_that_is_seen_late_adds_nothing_of_its_life_before(
    view: ClusterView, count: Callable[..., tuple[int, int]]
) -> None:
    view.sample()
    assert [count(700, 70), count(701, 72)] == [(0, 0), (1, 2)]


async def test_a_worker_that_was_away_adds_what_it_did_meanwhile_if_that_is_of_this_hour(
    view: ClusterView, directory: Directory, count: Callable[..., tuple[int, int]]
) -> None:
    count(700, 70)
    assert [count(), count(703, 70)] == [(0, 0), (3, 0)]
    assert [count(0, 0), count(704, 70)] == [(0, 0), (1, 0)]  # connected again, no report yet
    for _ in range(NUM_PERIODS - 1):
        count()
    assert count(705, 70) == (1, 0)

    for _ in range(NUM_PERIODS):
        count()
    assert count(900, 90) == (0, 0)


async def test_the_last_hour_has_as_many_periods(view: ClusterView, directory: Directory) -> None:
    directory.set_members({"d0": record("d0", "decode")})
    for _ in range(NUM_PERIODS + 1):
        view.sample()
    history = view.overview(None).history
    assert history.ready == {"decode": [1] * NUM_PERIODS}
    assert len(history.remote) == NUM_PERIODS
