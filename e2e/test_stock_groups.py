"""A worker of two pods, each with a rank of one stock vLLM: it answers from both behind one server,
restarts as a whole when one of its pods is killed, and drains through its leader.

As test_stock_vllm.py, where PDCLUSTER_E2E_VLLM is set.  Every answer is compared with the greedy
one of its prompt (`greedy`).
"""

import json
import time
from collections.abc import Callable, Iterator

import pytest

from e2e.client_program import Stories
from e2e.greedy import Greedy
from e2e.groups import (
    FOLLOWER,
    LEADER,
    SCALER,
    TWO_PODS,
    addresses,
    every_pod,
    restart_notes,
    uids,
    wait_for_groups,
)
from e2e.harness import LOOK_SECONDS, NAME, Kubernetes
from e2e.rig.paths import HAS_STOCK_ENGINE, STOCK_SWITCH
from e2e.stock import (
    SMALL,
    START_SECONDS,
    assert_greedy,
    elapsed,
    stock_example,
    wait_gone,
)
from e2e.streams import by_rank, metric, streams
from tests.system.waiting import wait_for

pytestmark = pytest.mark.skipif(
    not HAS_STOCK_ENGINE,
    reason=f"vLLM in a cluster takes 20 GB of disk and half an hour: set {STOCK_SWITCH}=1",
)

BEGIN_SECONDS = 120.0
STREAM_SECONDS = 600.0
REQUESTS = "pdcluster_engine_requests_total"
HITS = "pdcluster_prefix_cache_hit_tokens_total"
BLOCK = 32


@pytest.fixture(scope="module")
def room(cluster: Kubernetes) -> Iterator[Kubernetes]:
    """The cluster without any worker, before and after."""
    cluster.install_operator()
    remove(cluster)
    yield cluster
    remove(cluster)


def remove(cluster: Kubernetes) -> None:
    cluster.kubectl("delete", f"pdc/{NAME}", "--ignore-not-found")
    wait_gone(cluster)


@pytest.fixture
def wide(room: Kubernetes, note: Callable[[str], None]) -> Kubernetes:
    """One mixed worker of two pods that is ready, and a client pod."""
    body, since = stock_example(room), time.monotonic()
    spec = body["spec"]
    spec["engine"] |= {"dataParallelSize": 2, "blockSize": BLOCK}
    spec["qos"]["stallSeconds"] = 60  # no prompt here is long
    spec["roles"] = {"mixed": {"pools": [TWO_PODS], "resources": SMALL}}
    del spec["routing"]
    is_new = not room.pods()
    room.kubectl("apply", "--filename=-", stdin=json.dumps(body))
    room.start_client()
    wait_for_groups(room, 1, seconds=START_SECONDS)
    if is_new:
        note(f"both pods were ready after {elapsed(since)}")
    return room


def answered(cluster: Kubernetes, greedy: Greedy, *, first: int, clients: int = 1) -> str:
    """Have prompts answered, so many at a time, and check every token; returns the figures."""
    stories = Stories(count=6, clients=clients, max_tokens=16, words=120, first=first)
    with streams(cluster, stories) as running:
        answers = running.wait_ended(STREAM_SECONDS)
    return assert_greedy(answers, running, greedy)


def test_ranks_in_two_pods_answer_behind_one_server(
    wide: Kubernetes, greedy: Greedy, note: Callable[[str], None]
) -> None:
    (leader,), (follower,) = wide.pods(LEADER), wide.pods(FOLLOWER)
    containers = [container["name"] for container in follower["spec"]["containers"]]
    assert containers == ["engine"]
    assert addresses(wide) == {leader["status"]["podIP"]}

    before = by_rank(wide, leader, REQUESTS)

    note(answered(wide, greedy, first=100, clients=6))

    first, hits = by_rank(wide, leader, REQUESTS) - before, metric(wide, leader, HITS)
    assert set(first) == {"0", "1"}
    assert first.total() == 6
    # each goes where its prefix is, which the events of both pods say
    note(answered(wide, greedy, first=100))
    assert by_rank(wide, leader, REQUESTS) - before == first + first
    assert metric(wide, leader, HITS) - hits >= 6 * 2 * BLOCK


@pytest.mark.parametrize("role", [FOLLOWER, LEADER])
def test_a_killed_pod_restarts_its_whole_worker(
    wide: Kubernetes, greedy: Greedy, note: Callable[[str], None], role: str
) -> None:
    """No stream hangs: each of those that run comes to its end or says what is wrong."""
    before, (victim,) = uids(every_pod(wide)), wide.pods(role)
    name = victim["metadata"]["name"]
    stories = Stories(count=4, clients=4, max_tokens=400, words=40, first=200)
    with streams(wide, stories) as running:
        running.wait_begun(4, BEGIN_SECONDS)
        since = time.monotonic()
        wide.kubectl("delete", f"pod/{name}", "--force", "--grace-period=0", "--wait=false")
        answers = running.wait_ended(STREAM_SECONDS)
        ended = elapsed(since)

    assert all(answer["done"] or answer["error"] for answer in answers), answers
    greedy.check([each for each in answers if each["tokens"]], stories.words)
    wait_for_groups(wide, 1, gone=before, seconds=START_SECONDS)
    num_whole = sum(answer["done"] and not answer["error"] for answer in answers)
    note(f"{num_whole} of 4 streams whole, all ended {ended} after; serves after {elapsed(since)}")
    note(answered(wide, greedy, first=250))
    assert any(f"pod {name}: " in each for each in restart_notes(wide)), restart_notes(wide)


@pytest.mark.parametrize("role", [FOLLOWER, LEADER])
def test_a_stopped_pod_drains_its_worker_through_the_leader(
    wide: Kubernetes, greedy: Greedy, note: Callable[[str], None], role: str
) -> None:
    """As a drain of its node has it; both ranks finish what they compute."""
    before, (leaving,) = uids(every_pod(wide)), wide.pods(role)
    stories = Stories(count=4, clients=4, max_tokens=200, words=40, first=300)
    with streams(wide, stories) as running:
        running.wait_begun(4, BEGIN_SECONDS)
        num_open, since = running.num_open, time.monotonic()
        wide.kubectl("delete", f"pod/{leaving['metadata']['name']}", "--wait=false")
        answers = running.wait_ended(STREAM_SECONDS)

    assert num_open > 0
    note(f"{assert_greedy(answers, running, greedy)}; {num_open} open at the delete")
    wait_for_groups(wide, 1, gone=before, seconds=START_SECONDS)
    note(f"serves again after {elapsed(since)}")


def test_a_worker_that_is_scaled_away_drains_through_its_leader(
    wide: Kubernetes, greedy: Greedy, note: Callable[[str], None]
) -> None:
    stories = Stories(count=4, clients=4, max_tokens=200, words=40, first=400)
    with streams(wide, stories) as running:
        running.wait_begun(4, BEGIN_SECONDS)
        num_open = running.num_open
        wide.kubectl("scale", SCALER, "--replicas=0")
        answers = running.wait_ended(STREAM_SECONDS)

    assert num_open > 0
    note(f"{assert_greedy(answers, running, greedy)}; {num_open} open at the change")
    selector = f"--selector=pdcluster.io/cluster={NAME},pdcluster.io/worker"
    wait_for(
        lambda: not wide.get("pods,statefulsets", selector)["items"],
        START_SECONDS,
        lambda: wide.kubectl("get", "pods,statefulsets,pdc"),
        poll_seconds=LOOK_SECONDS,
    )
    wide.kubectl("scale", SCALER, "--replicas=1")  # which the next test waits for
