"""Decode workers that are evicted with less time than their streams take: behind routers every
stream goes on elsewhere; without, each is whole or ends with an error event.

Every answer, and what came of one that ended early, is compared with the greedy one of its prompt.
"""

import json
from collections.abc import Callable, Iterator

import pytest

from e2e.client_program import Stories
from e2e.greedy import Greedy
from e2e.harness import NAME, Json, Kubernetes, wait_for_workers, wait_until
from e2e.operator_at_work import kill_operator
from e2e.streams import Streams, cut, streams

DECODE = "pdcluster.io/role=decode"
BEGIN_SECONDS = 120.0
STREAM_SECONDS = 400.0
GRACE_SECONDS = 12  # less its preStop hook and the time to tell clients: 4 s


@pytest.fixture
def routed(fleet: Kubernetes) -> Iterator[Kubernetes]:
    """The fleet behind a router."""
    router = {"pools": [{"name": "cpu", "replicas": 1}]}
    patch_roles(fleet, {"router": router})
    wait_until(fleet, lambda: len(routers(fleet)) == 1 and fleet.is_ready())
    yield fleet
    patch_roles(fleet, {"router": None})
    wait_until(fleet, lambda: not routers(fleet) and fleet.is_ready())


def patch_roles(cluster: Kubernetes, roles: Json) -> None:
    patch = json.dumps({"spec": {"roles": roles}})
    cluster.kubectl("patch", f"pdc/{NAME}", "--type=merge", f"--patch={patch}")


def routers(cluster: Kubernetes) -> list[Json]:
    return cluster.pods("pdcluster.io/role=router")


def evicted(cluster: Kubernetes, running: Streams) -> int:
    """Evict one of the decode workers while streams are in their middle; returns their number."""
    goes = max(pod["metadata"]["name"] for pod in cluster.pods(DECODE))
    num_open = running.num_open
    assert num_open > 0
    cluster.evict(goes, grace_seconds=GRACE_SECONDS)
    return num_open


def test_streams_through_a_router_outlive_a_worker_that_has_little_time_and_no_operator(
    routed: Kubernetes, greedy: Greedy, note: Callable[[str], None]
) -> None:
    stories = Stories(count=16, clients=16, max_tokens=300, words=60, first=3000)
    with streams(routed, stories) as running:
        running.wait_begun(10, BEGIN_SECONDS)
        killed = kill_operator(routed)
        num_open = evicted(routed, running)
        answers = running.wait_ended(STREAM_SECONDS)
    wait_for_workers(routed, prefill=2, decode=2, router=1)

    assert killed
    assert cut(answers, stories) == []
    assert len(answers) == stories.count
    excused = greedy.check(answers, stories.words)
    note(f"{len(answers)} streams, {num_open} open at the eviction, {excused} excused")


def test_streams_of_a_worker_that_has_little_time_are_whole_or_end_with_an_error_event(
    fleet: Kubernetes, greedy: Greedy, note: Callable[[str], None]
) -> None:
    stories = Stories(count=16, clients=16, max_tokens=600, words=60, first=4000)
    with streams(fleet, stories) as running:
        running.wait_begun(10, BEGIN_SECONDS)
        num_open = evicted(fleet, running)
        answers = running.wait_ended(STREAM_SECONDS)
    wait_for_workers(fleet, prefill=2, decode=2)

    early = [answer for answer in answers if not answer["done"]]
    assert 0 < len(early) < stories.count
    for answer in early:
        assert (answer["status"], code_of(answer["error"])) in {
            (200, "draining"),
            (503, "draining"),
        }
    assert cut([answer for answer in answers if answer["done"]], stories) == []
    excused = greedy.check([answer for answer in answers if answer["tokens"]], stories.words)
    note(
        f"{len(answers)} streams, {num_open} open at the eviction, {len(early)} ended with an "
        f"error event, {excused} excused"
    )


def code_of(error: Json | str) -> str:
    """Code of an error event, or of a refusal's body."""
    found: Json = json.loads(error)["error"] if isinstance(error, str) else error
    return str(found["code"])
