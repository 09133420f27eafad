"""Records in etcd beside pods: ghosts, orphans, and what may be removed."""

from typing import Any

import pytest

from pdcluster_api.plan.observed.state import Previous, WorkerRecords
from pdcluster_api.plan.status.discovery import MISMATCH_GRACE_SECONDS, find_mismatches, in_sync
from tests.operator.pdcluster_api.plan.clusters import (
    NOW,
    condition_of,
    identity,
    make_cluster,
    plan_all,
    running,
    workload,
)
from tests.operator.pods import pod_states

OF = identity("r1")
NOTHING = Previous({})
WAS = {
    "conditions": [
        {
            "type": "DiscoveryInSync",
            "status": "False",
            "reason": "RecordsWithoutPods",
            "message": "as it was",
        }
    ]
}


def with_pods(*names: str, **fields: Any) -> list[Any]:
    return [workload(OF, len(names), pods=pod_states(OF, names, **fields))]


def worker_records(*names: str, mismatched: dict[str, float] | None = None) -> WorkerRecords:
    return WorkerRecords(dict.fromkeys(names, "ready"), mismatched=mismatched or {})


def test_records_of_all_pods_and_no_others_are_in_sync():
    found = in_sync(worker_records("a", "b"), with_pods("a", "b"), NOTHING)
    assert found.condition is not None
    assert (found.condition.is_true, found.stale_records, found.requeue_after_seconds) == (
        True,
        (),
        None,
    )


@pytest.mark.parametrize(
    "workloads",
    [with_pods("a", "b", terminating=True), with_pods("a", "b", ready=False)],
    ids=["ending", "not-ready"],
)
def test_a_pod_that_ends_or_starts_is_expected_to_have_a_record_or_none(workloads: list[Any]):
    for names in ((), ("a",), ("a", "b")):
        found = in_sync(
            worker_records(*names, mismatched={"a": 99.0, "b": 99.0}), workloads, NOTHING
        )
        assert found.condition is not None
        assert found.condition.is_true


def test_what_has_just_begun_is_looked_at_again_and_not_reported_yet():
    found = in_sync(
        worker_records("a", "ghost", mismatched={"ghost": MISMATCH_GRACE_SECONDS - 1}),
        with_pods("a", "orphan"),
        NOTHING,
    )
    assert found.condition is not None
    assert (found.condition.is_true, found.stale_records) == (True, ())
    assert found.requeue_after_seconds is not None


def test_ghosts_that_stay_are_reported_and_may_be_removed():
    found = in_sync(
        worker_records("a", "ghost", mismatched={"ghost": MISMATCH_GRACE_SECONDS}),
        with_pods("a"),
        NOTHING,
    )
    assert found.condition is not None
    assert (found.condition.is_true, found.condition.reason, found.stale_records) == (
        False,
        "RecordsWithoutPods",
        ("ghost",),
    )


def test_orphans_that_stay_are_reported():
    mismatched = dict.fromkeys("bcde", MISMATCH_GRACE_SECONDS)
    found = in_sync(
        worker_records("a", mismatched=mismatched), with_pods("a", "b", "c", "d", "e"), NOTHING
    )
    assert found.condition is not None
    assert (found.condition.reason, found.stale_records) == ("PodsWithoutRecords", ())


def test_when_most_have_no_pod_at_once_none_is_removed():
    mismatched = dict.fromkeys("bc", MISMATCH_GRACE_SECONDS)
    found = in_sync(worker_records("a", "b", "c", mismatched=mismatched), with_pods("a"), NOTHING)
    assert found.condition is not None
    assert (found.condition.reason, found.stale_records) == ("RecordsWithoutPods", ())


def test_a_worker_that_drains_is_odd_without_a_record_and_no_orphan():
    draining = with_pods("a", ready=False, started=True)
    assert find_mismatches({}, draining) == {"a"}
    assert (
        find_mismatches({}, with_pods("a", ready=False))
        == find_mismatches({}, with_pods("a", started=True, terminating=True))
        == frozenset()
    )
    found = in_sync(worker_records(mismatched={"a": 99.0}), draining, NOTHING)
    assert found.condition is not None
    assert found.condition.is_true


def test_an_etcd_that_does_not_answer_is_looked_at_again():
    assert (
        in_sync(
            WorkerRecords(error="away", again_seconds=20.0), with_pods("a"), NOTHING
        ).requeue_after_seconds
        == 20.0
    )
    # its first answer makes the cluster due
    assert in_sync(None, with_pods("a"), NOTHING).requeue_after_seconds is None


@pytest.mark.parametrize("known", [None, WorkerRecords(error="away")], ids=["not-asked", "away"])
def test_while_etcd_does_not_answer_it_stays_as_it_was(known: WorkerRecords | None):
    found = in_sync(known, with_pods("a"), Previous(WAS))
    assert found.condition is not None
    assert (found.condition.is_true, found.condition.message, found.stale_records) == (
        False,
        "as it was",
        (),
    )
    assert in_sync(known, with_pods("a"), NOTHING).condition is None


def test_the_status_has_it_once_etcd_was_read_and_ready_does_not_follow_it():
    cluster = make_cluster()
    assert not condition_of(plan_all(cluster, running(cluster), NOW).status, "DiscoveryInSync")
    known = worker_records("a", "b", "ghost", mismatched={"ghost": MISMATCH_GRACE_SECONDS})
    observed = running(cluster, worker_records=known)
    of = observed.workloads[0].id
    seen_pods = [workload(of, 1, pods=pod_states(of, "ab")), *observed.workloads[1:]]
    plan = plan_all(cluster, running(cluster, worker_records=known, workloads=seen_pods), NOW)
    assert condition_of(plan.status, "DiscoveryInSync")["status"] == "False"
    assert condition_of(plan.status, "Ready")["status"] == "True"
    assert plan.stale_records == ("ghost",)
