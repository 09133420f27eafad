"""Pods that should have ended and do not: a time is given to them, then a user is asked."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from pdcluster_api.plan.observed.pools import ENDING_SECONDS, ending_of
from pdcluster_api.plan.observed.state import DiscoveryState, EndingPod, Observed, PodState, Problem
from pdcluster_schema import conditions as words
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.plan.clusters import (
    ETCD_READY,
    NOW,
    Planned,
    condition_of,
    identity,
    make_cluster,
    plan_all,
    running,
    workload,
)
from tests.operator.pods import pod_state

CLUSTER = make_cluster()
NEXT = make_cluster(engine=65, strategy="Recreate")
A, B = revision_of(CLUSTER.spec), revision_of(NEXT.spec)
PREFILL, DECODE = identity(A, "prefill"), identity(A)
TAINT = "kubectl taint node n1 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"


def late(seconds: float) -> str:
    """The time at which a pod should have been gone, so many seconds ago."""
    return (datetime.fromisoformat(NOW) - timedelta(seconds=seconds)).isoformat()


def ending(ordinal: int, seconds: float, **fields: Any) -> PodState:
    facts = {"ready": False, "terminating": True, "node": "n1", "since": late(seconds), **fields}
    return pod_state(DECODE, ordinal, **facts)


def plan_of(cluster: PDCluster, observed: Observed) -> Planned:
    return plan_all(cluster, observed, NOW)


def shown(plan: Planned, kind: str) -> tuple[str, str, str]:
    found = condition_of(plan.status, kind)
    return found["status"], found["reason"], found["message"]


def old_pods(*pods: PodState, gone: bool = True) -> Observed:
    """Rest of the old revision that Recreate has to wait for."""
    left = workload(DECODE, 0, 0, current=len(pods), gone=gone, pods=pods)
    return running(CLUSTER, workloads=[left])


def test_recreate_waits_for_a_pod_for_its_time_and_goes_on_without_one_that_is_lost() -> None:
    waits = plan_of(NEXT, old_pods(ending(0, ENDING_SECONDS - 5)))
    assert (waits.workloads, waits.ends_first) == ((), True)
    assert waits.requeue_after_seconds == 5

    goes_on = plan_of(NEXT, old_pods(ending(0, ENDING_SECONDS), ending(1, 86400.0)))
    assert {each.id.revision for each in goes_on.workloads} == {B}
    assert not goes_on.ends_first


@pytest.mark.parametrize(
    "observed",
    [
        old_pods(ending(0, 86400.0), ending(1, 0.0)),
        old_pods(ending(0, 86400.0), gone=False),
        old_pods(ending(0, 86400.0, since=None)),
        old_pods(),
    ],
    ids=["another one ends", "not yet deleted", "no time is known", "pods not known yet"],
)
def test_recreate_waits_for_everything_else(observed: Observed) -> None:
    assert plan_of(NEXT, observed).workloads == ()


def test_a_worker_on_a_lost_node_stalls_the_cluster_with_the_command_to_run() -> None:
    def seen(*pods: PodState) -> Observed:
        state = workload(DECODE, 2, 1, pods=pods)
        return running(CLUSTER, workloads=[workload(PREFILL, 1), state])

    before = plan_of(CLUSTER, seen(ending(0, ENDING_SECONDS - 1), pod_state(DECODE, 1)))
    assert shown(before, words.DECODE_READY)[1] == words.STARTING
    assert f"{DECODE.name}-0 on node n1 is still ending" in shown(before, words.DECODE_READY)[2]
    assert before.requeue_after_seconds == 1

    after = plan_of(CLUSTER, seen(ending(0, ENDING_SECONDS), pod_state(DECODE, 1)))
    status, reason, message = shown(after, words.DECODE_READY)
    assert (status, reason) == ("False", words.NODE_LOST)
    assert f"`{TAINT}`, or `kubectl delete pod {DECODE.name}-0 --force`" in message
    assert "still ending" not in message
    assert shown(after, words.READY)[1] == shown(after, words.STALLED)[1] == words.NODE_LOST


@pytest.mark.parametrize(("seconds", "is_lost"), [(30.0, False), (ENDING_SECONDS, True)])
def test_a_pod_of_a_node_that_is_known_to_be_lost_waits_for_no_grace_period(
    seconds: float, is_lost: bool
) -> None:
    pods = (ending(0, -300.0), ending(1, -300.0, node="n2"))
    states = [workload(PREFILL, 1), workload(DECODE, 2, 0, pods=pods)]
    observed = running(CLUSTER, workloads=states, lost_nodes={"n1": late(seconds)})

    found, plan = ending_of(observed, NOW), plan_of(CLUSTER, observed)

    assert found.lost == ({f"{DECODE.name}-0"} if is_lost else set())
    assert found.next_seconds == (360.0 if is_lost else 30.0)
    _, reason, message = shown(plan, words.DECODE_READY)
    assert reason == words.NODE_LOST
    assert f"pod {DECODE.name}-0 on node n1 has not ended" in message
    assert f"{DECODE.name}-1 on node n2 is still ending" in message


def test_lost_pods_are_counted_and_a_worse_problem_comes_first() -> None:
    both = workload(DECODE, 2, 0, pods=(ending(0, 61.0), ending(1, 61.0)))
    observed = running(CLUSTER, workloads=[workload(PREFILL, 1), both])
    assert (
        f"pod {DECODE.name}-0 on node n1 (and 1 more)"
        in shown(plan_of(CLUSTER, observed), words.DECODE_READY)[2]
    )

    failing = pod_state(DECODE, 1, ready=False, problem=Problem(words.CRASH_LOOPING, "it crashes"))
    worse = workload(DECODE, 2, 0, pods=(ending(0, 61.0), failing))
    observed = running(CLUSTER, workloads=[workload(PREFILL, 1), worse])
    assert shown(plan_of(CLUSTER, observed), words.DECODE_READY)[1] == words.CRASH_LOOPING


def test_a_surplus_pod_on_a_lost_node_keeps_no_other_from_its_place() -> None:
    pods = (pod_state(DECODE, 0), pod_state(DECODE, 1), ending(2, 86400.0))
    observed = running(
        CLUSTER, workloads=[workload(PREFILL, 1), workload(DECODE, 2, current=3, pods=pods)]
    )
    assert shown(plan_of(CLUSTER, observed), words.READY)[:2] == ("True", words.AS_DECLARED)


def with_etcd(seconds: float, **fields: Any) -> Observed:
    pod = EndingPod("chat-etcd-0", "n1", late(seconds))
    state = replace(DiscoveryState(managed=True, ready=0, desired=1, ending=(pod,)), **fields)
    return running(CLUSTER, discovery=state)


def test_a_member_of_etcd_on_a_lost_node_is_named_and_stalls_the_cluster() -> None:
    before = plan_of(CLUSTER, with_etcd(ENDING_SECONDS - 1))
    assert shown(before, words.DISCOVERY_READY)[1:] == (
        words.STARTING,
        "0 of 1 etcd members are ready; pod chat-etcd-0 on node n1 is still ending",
    )
    assert before.requeue_after_seconds == 1

    after = plan_of(CLUSTER, with_etcd(ENDING_SECONDS))
    _, reason, message = shown(after, words.DISCOVERY_READY)
    assert reason == shown(after, words.STALLED)[1] == words.NODE_LOST
    assert TAINT in message
    assert "`kubectl delete pod chat-etcd-0 --force`" in message

    in_place = plan_of(CLUSTER, with_etcd(86400.0, ready=ETCD_READY.ready))
    assert shown(in_place, words.DISCOVERY_READY)[:2] == ("True", words.ETCD_ANSWERS)


def test_a_pod_without_a_node_is_deleted_alone() -> None:
    message = shown(
        plan_of(CLUSTER, with_etcd(86400.0, ending=(EndingPod("chat-etcd-0", "", late(61.0)),))),
        words.DISCOVERY_READY,
    )[2]
    assert "taint" not in message
    assert message.endswith("`kubectl delete pod chat-etcd-0 --force`")
