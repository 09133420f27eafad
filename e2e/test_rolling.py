"""A new revision comes step by step under load, on two nodes and with the autoscaler at work, with
room for one worker more than there are; and behind a router, which steps aside meanwhile.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from e2e.client_program import Stories
from e2e.harness import (
    LOOK_SECONDS,
    NAME,
    SELECTOR,
    Json,
    Kubernetes,
    example,
    ready,
    wait_for_workers,
)
from e2e.rig import cluster as rig
from e2e.rig import removal
from e2e.rig.components import SECOND
from e2e.streams import cut, streams
from tests.system.waiting import wait_for

REVISION = "pdcluster.io/revision"
WANTED = {"prefill": 2, "decode": 4}
BUDGET = sum(WANTED.values()) + 1
ROLL_SECONDS = 1200.0
END_SECONDS = 120.0
STORIES = Stories(
    count=100_000,
    clients=3,
    max_tokens=40,
    words=60,
    third_words=600,  # remotely, but where a revision has no prefill worker yet
    seconds=2 * ROLL_SECONDS,
)
MEMORY = {"memory": "1800Mi"}
SMALL = {"requests": {"cpu": "100m", **MEMORY}, "limits": {"cpu": "1", **MEMORY}}


@dataclass(frozen=True)
class Look:
    """The workers at one moment, without those that are ending.

    held: those that are ending, too
    """

    pods: list[Json]
    held: int

    @property
    def nodes(self) -> set[str]:
        """Those of ready workers."""
        return {pod["spec"]["nodeName"] for pod in ready(self.pods)}

    def number(self, role: str, revision: str | None = None) -> int:
        """Ready workers, of one revision or of all."""
        return sum(
            labels["pdcluster.io/role"] == role and revision in (None, labels[REVISION])
            for labels in (pod["metadata"]["labels"] for pod in ready(self.pods))
        )

    def revisions(self) -> Counter[str]:
        return Counter(pod["metadata"]["labels"][REVISION] for pod in self.pods)

    def distance(self, revision: str) -> float:
        """By how many workers the roles are away from one common share of the new revision: with
        one worker each at most, the roles' shares differ by a worker of each.
        """
        shares = [self.number(role, revision) / number for role, number in WANTED.items()]
        return (max(shares) - min(shares)) / sum(1 / number for number in WANTED.values())


@pytest.fixture
def two_nodes(chat: Kubernetes) -> Iterator[Kubernetes]:
    """The example on a cluster with a second node; afterwards it is on the first one."""
    if chat.rig is None:
        pytest.skip("gives the rig a second node, which no other cluster can be given")
    rig.add_node(chat.rig)
    try:
        yield chat
        chat.kubectl("cordon", SECOND.name)
        restore(chat)
    finally:
        removal.down(chat.rig.second)
        chat.kubectl("delete", f"node/{SECOND.name}", "--ignore-not-found")


def restore(cluster: Kubernetes) -> None:
    cluster.replace(example()["spec"])
    cluster.scale(prefill=1, decode=1)
    wait_for_workers(cluster, seconds=ROLL_SECONDS, prefill=1, decode=1)


@pytest.fixture
def six(two_nodes: Kubernetes) -> Json:
    """The spec of two prefill and four decode workers that are ready on both nodes, with Rolling
    and the autoscaler on.
    """
    spec = example()["spec"]
    for role, number in WANTED.items():
        bounds = {"replicas": number, "minReplicas": number, "maxReplicas": number + 1}
        spec["roles"][role] = {
            "pools": [{"name": "cpu", "gpu": "cpu", **bounds}],
            "resources": SMALL,
        }
    spec["engine"]["kvCacheMemory"] = "128Mi"
    spec["rollout"]["strategy"] = "Rolling"
    spec["autoscale"] = {"mode": "On", "budget": {"total": BUDGET}}
    two_nodes.replace(spec)
    wait_for_workers(two_nodes, seconds=ROLL_SECONDS, **WANTED)
    assert len(look(two_nodes).nodes) == 2, two_nodes.kubectl("get", "pods", "--output=wide")
    return spec


@pytest.fixture
def routed(chat: Kubernetes) -> Iterator[Json]:
    """The spec of one prefill and two decode workers behind a router, with Rolling; afterwards the
    example is as it was.
    """
    spec = example()["spec"]
    spec["roles"]["decode"]["pools"][0]["replicas"] = 2
    for role in ("prefill", "decode"):
        spec["roles"][role]["resources"] = SMALL
    spec["roles"]["router"] = {"pools": [{"name": "cpu", "replicas": 1}]}
    spec["engine"]["kvCacheMemory"] = "128Mi"
    spec["rollout"]["strategy"] = "Rolling"
    chat.replace(spec)
    chat.scale(prefill=1, decode=2)
    wait_for_workers(chat, seconds=ROLL_SECONDS, prefill=1, decode=2, router=1)
    yield spec
    restore(chat)


def look(cluster: Kubernetes) -> Look:
    found = cluster.get("pods", f"--selector={SELECTOR},pdcluster.io/role")["items"]
    return Look([pod for pod in found if "deletionTimestamp" not in pod["metadata"]], len(found))


def roll(cluster: Kubernetes, spec: Json, stories: Stories) -> tuple[list[Look], list[Json]]:
    """Change the engine under load until only the new revision is there: what was seen meanwhile,
    and the answers of streams that began meanwhile.
    """
    (old,) = look(cluster).revisions()
    looks: list[Look] = []

    def is_done() -> bool:
        looks.append(look(cluster))
        return old not in looks[-1].revisions() and cluster.is_ready()

    with streams(cluster, stories) as opened:
        opened.wait_begun(stories.clients, END_SECONDS)
        spec["engine"]["maxBatchedTokens"] = 128
        cluster.replace(spec)
        wait_for(
            is_done,
            ROLL_SECONDS,
            lambda: cluster.kubectl("get", "pods,pdc"),
            poll_seconds=LOOK_SECONDS,
        )
        begun = set(opened.begun)
        wait_for(
            lambda: begun <= {answer["index"] for answer in list(opened.ended)},
            END_SECONDS,
            "streams of the roll out to end",
        )
        return looks, list(opened.ended)


@pytest.mark.long
def test_a_revision_comes_step_by_step_under_load_and_no_stream_fails(
    two_nodes: Kubernetes, six: Json, note: Callable[[str], None]
) -> None:
    begin = time.monotonic()
    looks, answers = roll(two_nodes, six, STORIES)
    (new,) = looks[-1].revisions()
    seconds = time.monotonic() - begin
    note(f"{seconds:.0f} s, {len(answers)} streams, {len(looks)} looks on two nodes")
    assert cut(answers, STORIES) == []
    assert {answer["prefill"] for answer in answers} == {"local", "remote"}
    assert max(each.held for each in looks) <= BUDGET
    for role, number in WANTED.items():
        assert min(each.number(role) for each in looks) >= number
    assert max(each.distance(new) for each in looks) <= 1
    # both serve meanwhile: neither a switch at once, nor one role before the other
    assert {each.number("decode", new) for each in looks} >= set(range(WANTED["decode"] + 1))


@pytest.mark.long
def test_the_router_steps_aside_while_a_revision_comes_and_no_stream_fails(
    chat: Kubernetes, routed: Json, note: Callable[[str], None]
) -> None:
    looks, answers = roll(chat, routed, STORIES)
    (new,) = looks[-1].revisions()

    note(f"{len(answers)} streams, {len(looks)} looks")
    assert cut(answers, STORIES) == []
    assert min(each.number("decode") for each in looks) >= 2
    assert 0 in {each.number("router") for each in looks}  # clients reach decode workers meanwhile
    assert looks[-1].number("router", new) == 1
    (leads_to,) = chat.get(f"endpoints/{NAME}")["subsets"][0]["addresses"]
    assert leads_to["targetRef"]["name"].startswith(f"{NAME}-router-")
