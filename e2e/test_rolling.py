"""A new revision comes step by step under load, the autoscaler at work, with room for one worker
more than there are.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from e2e.client_program import Stories
from e2e.harness import (
    LOOK_SECONDS,
    SELECTOR,
    Json,
    Kubernetes,
    example,
    ready,
    wait_for_workers,
)
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
def six(chat: Kubernetes) -> Iterator[Json]:
    """The spec of two prefill and four decode workers that are ready, with Rolling and the
    autoscaler on; afterwards the example is as it was.
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
    chat.replace(spec)
    wait_for_workers(chat, seconds=ROLL_SECONDS, **WANTED)
    yield spec
    chat.replace(example()["spec"])
    chat.scale(prefill=1, decode=1)
    wait_for_workers(chat, seconds=ROLL_SECONDS, prefill=1, decode=1)


def look(cluster: Kubernetes) -> Look:
    found = cluster.get("pods", f"--selector={SELECTOR},pdcluster.io/role")["items"]
    return Look([pod for pod in found if "deletionTimestamp" not in pod["metadata"]], len(found))


@pytest.mark.long
def test_a_revision_comes_step_by_step_under_load_and_no_stream_fails(
    chat: Kubernetes, six: Json, note: Callable[[str], None]
) -> None:
    (old,) = look(chat).revisions()
    looks: list[Look] = []

    def is_done() -> bool:
        looks.append(look(chat))
        return old not in looks[-1].revisions() and chat.is_ready()

    with streams(chat, STORIES) as opened:
        opened.wait_begun(STORIES.clients, END_SECONDS)
        six["engine"]["maxBatchedTokens"] = 128
        begin = time.monotonic()
        chat.replace(six)
        wait_for(
            is_done,
            ROLL_SECONDS,
            lambda: chat.kubectl("get", "pods,pdc"),
            poll_seconds=LOOK_SECONDS,
        )
        seconds = time.monotonic() - begin
        begun = set(opened.begun)
        wait_for(
            lambda: begun <= {answer["index"] for answer in list(opened.ended)},
            END_SECONDS,
            "streams of the roll out to end",
        )
        answers = list(opened.ended)

    (new,) = looks[-1].revisions()
    note(f"{seconds:.0f} s, {len(answers)} streams, {len(looks)} looks")
    assert cut(answers, STORIES) == []
    assert {answer["prefill"] for answer in answers} == {"local", "remote"}
    assert max(each.held for each in looks) <= BUDGET
    for role, number in WANTED.items():
        assert min(each.number(role) for each in looks) >= number
    assert max(each.distance(new) for each in looks) <= 1
    # both serve meanwhile: neither a switch at once, nor one role before the other
    assert {each.number("decode", new) for each in looks} >= set(range(WANTED["decode"] + 1))
