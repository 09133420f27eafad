"""The etcd that is run for a cluster, as its pods' bodies show."""

from typing import Any

import pytest

from pdcluster_api.apiserver.observe import Live, managed_etcd
from pdcluster_api.plan.observed.state import EndingPod, Problem
from pdcluster_schema import conditions as words
from pdcluster_schema.labels import cluster_labels
from tests.operator import bodies as made
from tests.operator.pods import pod_body

NAME = "chat-etcd"
BAD_IMAGE = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
CRASHED = {"waiting": {"reason": "CrashLoopBackOff"}}


def member(number: int = 0, state: dict[str, Any] | None = None, **status: Any) -> made.Body:
    """A pod of the etcd, as the cache keeps it: without its spec."""
    entry = {
        "name": "etcd",
        "image": "etcd:none",
        "restartCount": 3,
        "state": state or {"running": {}},
        "ready": state is None,
    }
    if state is CRASHED:
        entry["lastState"] = {
            "terminated": {
                "exitCode": 1,
                "message": '{"level":"fatal","ts":"1","msg":"cannot listen"}',
            }
        }
    labels = {**cluster_labels(made.NAME, "etcd"), "app.kubernetes.io/name": "etcd"}
    found = {
        "conditions": [{"type": "Ready", "status": str(state is None)}],
        "containerStatuses": [entry],
        **status,
    }
    return pod_body(f"{NAME}-{number}", metadata={"labels": labels}, status=found)


def stateful_set(ready: int, desired: int = 1, current: int | None = None) -> made.Body:
    status = {"readyReplicas": ready, "replicas": desired if current is None else current}
    return made.child("StatefulSet", NAME, spec={"replicas": desired}, status=status)


UNPLACED = {
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/1 nodes: no volume",
        }
    ]
}
PROBLEMS = {
    "its image": (
        member(state=BAD_IMAGE),
        words.IMAGE_NOT_PULLED,
        ["'etcd:none' cannot be pulled (not found)", "spec.discovery.etcd.image"],
    ),
    "a name that is none": (
        member(state={"waiting": {"reason": "InvalidImageName"}}),
        words.IMAGE_NOT_PULLED,
        ["correct spec.discovery.etcd.image"],
    ),
    "it crashes": (
        member(state=CRASHED),
        words.CRASH_LOOPING,
        ["exit status 1: cannot listen", "kubectl logs -p -c etcd"],
    ),
    "no node": (
        member(state={"waiting": {}}, **UNPLACED),
        words.UNSCHEDULABLE,
        ["0/1 nodes: no volume", "discovery.etcd.storage"],
    ),
}


@pytest.mark.parametrize(("pod", "reason", "parts"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_member_that_cannot_start_is_a_problem_with_advice_for_an_etcd(
    pod: made.Body, reason: str, parts: list[str]
):
    found = managed_etcd(Live(made.cluster(), [stateful_set(0), pod]), NAME, 1, {}).problem
    assert found is not None
    assert found[0] == reason
    assert found[1].startswith("pod chat-etcd-0: ")
    assert all(part in found[1] for part in parts), found[1]
    assert "spec.image:" not in found[1]
    assert "gpu" not in found[1]


def test_the_worst_member_counts_and_one_that_is_ready_does_not():
    bodies = [stateful_set(1, 3), member(0), member(1, CRASHED), member(2, BAD_IMAGE)]
    state = managed_etcd(Live(made.cluster(), bodies), NAME, 3, {})
    assert (state.ready, state.desired) == (1, 3)
    assert state.problem is not None
    assert state.problem[1].startswith("pod chat-etcd-2: image")


def test_an_etcd_that_just_starts_or_is_ready_has_no_problem():
    assert managed_etcd(Live(made.cluster(), []), NAME, 1, {}).problem is None
    assert (
        managed_etcd(Live(made.cluster(), [stateful_set(1), member()]), NAME, 1, {}).problem is None
    )


def test_a_workers_problem_is_not_the_etcds():
    worker = pod_body(
        "chat-decode-cpu-0",
        metadata={"labels": cluster_labels(made.NAME, "decode")},
        status=member(state=BAD_IMAGE)["status"],
    )
    assert (
        managed_etcd(Live(made.cluster(), [stateful_set(0), worker]), NAME, 1, {}).problem is None
    )


@pytest.mark.parametrize(("current", "is_told"), [(0, True), (1, False)])
def test_what_keeps_members_from_being_made_is_reported_while_they_are_missing(
    current: int, is_told: bool
):
    fault = Problem(words.QUOTA_EXCEEDED, "a pod is forbidden: exceeded quota")
    state = managed_etcd(
        Live(made.cluster(), [stateful_set(0, 1, current)]), NAME, 1, {NAME: fault}
    )
    assert state.problem == (fault if is_told else None)


def test_members_that_end_are_known_with_their_node_and_the_end_of_their_time():
    gone = "2026-01-02T03:04:05Z"
    ending = member()
    ending["metadata"]["deletionTimestamp"] = gone
    ending["spec"] = {"nodeName": "n1"}
    state = managed_etcd(Live(made.cluster(), [stateful_set(0), ending]), NAME, 1, {})
    assert state.problem is None
    assert state.ending == (EndingPod("chat-etcd-0", "n1", gone),)


def deployment(ready: int, **status: Any) -> made.Body:
    found = {"readyReplicas": ready, "replicas": ready, **status}
    return made.child("Deployment", NAME, spec={"replicas": 1}, status=found)


def test_a_deployment_counts_before_the_stateful_set_that_it_follows():
    state = managed_etcd(Live(made.cluster(), [stateful_set(1), deployment(0)]), NAME, 1, {})
    assert (state.ready, state.problem) == (0, None)
    state = managed_etcd(Live(made.cluster(), [stateful_set(0), deployment(1)]), NAME, 1, {})
    assert state.ready == 1


@pytest.mark.parametrize(("status", "replicas"), [("True", 0), ("False", 0), ("True", 1)])
def test_what_keeps_a_deployment_from_its_pod_is_its_own_condition(status: str, replicas: int):
    message = 'pods "chat-etcd-1-2" is forbidden: exceeded quota: few'
    failing = {"type": "ReplicaFailure", "status": status, "message": message}
    body = deployment(0, replicas=replicas, conditions=[failing])
    state = managed_etcd(Live(made.cluster(), [body]), NAME, 1, {})
    is_refused = (status, replicas) == ("True", 0)
    expected = Problem(words.QUOTA_EXCEEDED, "a pod is forbidden: exceeded quota: few")
    assert state.problem == (expected if is_refused else None)
