"""Workers that leave take no stream with them: scaled away, with the operator killed meanwhile, and
evicted in mid-transfer.

Every answer is compared with the greedy one of its prompt (`greedy`).
"""

from collections.abc import Callable

import pytest

from e2e.client_program import Stories
from e2e.greedy import Greedy
from e2e.harness import LOOK_SECONDS, NAME, Json, Kubernetes, ready, wait_for_workers
from e2e.operator_at_work import kill_operator, operator_pod
from e2e.rig.shell import CommandError
from e2e.streams import Streams, cut, streams
from e2e.witness import Witness, witness
from tests.system.waiting import wait_for

PREFILL, DECODE = "pdcluster.io/role=prefill", "pdcluster.io/role=decode"
BEGIN_SECONDS = 120.0
STREAM_SECONDS = 300.0
GONE_SECONDS = 120.0


def last_pods(cluster: Kubernetes) -> list[str]:
    """The highest ordinal of each role: the ones that a scale-down takes."""
    return [
        max(pod["metadata"]["name"] for pod in cluster.pods(role)) for role in (PREFILL, DECODE)
    ]


def sizes(cluster: Kubernetes) -> dict[str, int]:
    """Replicas of the StatefulSet of each role."""
    found = cluster.get(
        "statefulsets", f"--selector=pdcluster.io/cluster={NAME},pdcluster.io/role"
    )["items"]
    return {
        each["metadata"]["labels"]["pdcluster.io/role"]: each["spec"]["replicas"] for each in found
    }


def holdings(seen: Witness, pods: list[str]) -> dict[str, int]:
    """The most requests and transfers that each pod had still to finish when it began to drain."""
    return {
        pod: max(holding for _, state, holding in seen.states(pod) if state == "draining")
        for pod in pods
    }


def assert_drained_first(seen: Witness, pods: list[str]) -> None:
    """Each pod had something to finish, and its StatefulSet shrank after it had."""
    for pod in pods:
        drained = seen.drained_at(pod)
        assert holdings(seen, [pod])[pod] > 0, f"{pod} had nothing to finish"
        assert drained < seen.shrunk_at(pod), (
            f"{pod} drained at {drained}, StatefulSets: {seen.sizes}"
        )


def assert_whole(running: Streams, answers: list[Json], greedy: Greedy) -> str:
    """None is missing, cut or not greedy; returns the figures."""
    assert cut(answers, running.stories) == []
    assert len(answers) == running.stories.count
    excused = greedy.check(answers, running.stories.words)
    num_remote = sum(answer["prefill"] == "remote" for answer in answers)
    num_tokens = sum(len(answer["tokens"]) for answer in answers)
    return (
        f"{len(answers)} streams, {num_remote} prefilled remotely, {num_tokens} tokens, {excused} "
        "excused at a near tie"
    )


def test_hundred_streams_live_through_a_scale_down_of_both_roles(
    fleet: Kubernetes, greedy: Greedy, note: Callable[[str], None]
) -> None:
    stories = Stories(
        count=100,
        clients=100,
        max_tokens=80,
        words=80,
        prefill=("auto", "remote", "local", "remote"),
    )
    leaving = last_pods(fleet)
    with witness(fleet, leaving) as seen, streams(fleet, stories) as running:
        running.wait_begun(40, BEGIN_SECONDS)  # and the prompts of the others are on their way
        num_open = running.num_open
        fleet.scale(prefill=1, decode=1)
        answers = running.wait_ended(STREAM_SECONDS)
        wait_for_workers(fleet, prefill=1, decode=1, seconds=GONE_SECONDS)

    assert num_open >= 30
    figures = assert_whole(running, answers, greedy)
    assert_drained_first(seen, leaving)
    note(
        f"{figures}; {num_open} were in their middle at the scale-down, which found "
        f"{holdings(seen, leaving)}"
    )


def test_drain_goes_on_without_the_operator_that_began_it(
    fleet: Kubernetes, greedy: Greedy, note: Callable[[str], None]
) -> None:
    stories = Stories(
        count=24, clients=24, max_tokens=200, words=80, first=1000, prefill=("auto", "remote")
    )
    leaving = last_pods(fleet)
    with witness(fleet, leaving) as seen, streams(fleet, stories) as running:
        running.wait_begun(12, BEGIN_SECONDS)
        fleet.scale(prefill=1, decode=1)
        wait_for(
            lambda: [state for pod in leaving for _, state, _ in seen.states(pod)],
            30.0,
            "the operator to write their drain commands",
        )
        killed = kill_operator(fleet)
        assert sizes(fleet)["decode"] == 2
        num_open = running.num_open
        assert num_open > 0
        answers = running.wait_ended(STREAM_SECONDS)
        wait_for_workers(fleet, prefill=1, decode=1, seconds=GONE_SECONDS)

    assert operator_pod(fleet) not in ("", killed)
    figures = assert_whole(running, answers, greedy)
    assert_drained_first(seen, leaving[1:])
    note(f"{figures}; {num_open} were open when the operator was killed")


def test_evicted_prefill_pod_finishes_its_transfers(
    fleet: Kubernetes, greedy: Greedy, note: Callable[[str], None]
) -> None:
    stories = Stories(count=14, clients=6, max_tokens=8, words=900, first=2000, prefill=("remote",))
    stays, goes = sorted(pod["metadata"]["name"] for pod in fleet.pods(PREFILL))
    uids = {pod["metadata"]["uid"] for pod in fleet.pods(PREFILL)}
    with witness(fleet, [goes]) as seen, streams(fleet, stories) as running:
        running.wait_begun(1, BEGIN_SECONDS)
        fleet.evict(goes)
        with pytest.raises(CommandError, match="disruption budget"):
            fleet.evict(stays)
        answers = running.wait_ended(STREAM_SECONDS)

        def is_replaced() -> bool:
            found = ready(fleet.pods(PREFILL))
            return len(found) == 2 and {pod["metadata"]["uid"] for pod in found} != uids

        wait_for(
            is_replaced,
            GONE_SECONDS,
            lambda: fleet.kubectl("get", "pods"),
            poll_seconds=LOOK_SECONDS,
        )

    figures = assert_whole(running, answers, greedy)
    assert {answer["prefill"] for answer in answers} == {"remote"}
    seen.drained_at(goes)
    assert holdings(seen, [goes])[goes] > 0
    note(f"{figures}; the eviction found {holdings(seen, [goes])}")
