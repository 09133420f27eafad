"""Reconciles that need not compare the children again: only those with the very inputs that asked
for no write.
"""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pdcluster_api.apiserver.observe import Live
from pdcluster_api.plan.cluster import plan_cluster
from pdcluster_api.plan.result import ClusterPlan
from pdcluster_operator.reconcile.fingerprint import MAX_SECONDS, FingerprintInputs, fingerprint_of
from tests.operator.bodies import child, cluster
from tests.operator.pdcluster_api.plan.clusters import NOW as STAMP
from tests.operator.pdcluster_api.plan.clusters import make_cluster, running

NOW = datetime(2026, 1, 2, tzinfo=UTC)
SERVICE = child("Service", "chat", metadata={"resourceVersion": "7"})


def plan_of(**fields: Any) -> ClusterPlan:
    made = make_cluster()
    return replace(plan_cluster(made, running(made), STAMP), **fields)


def inputs(
    plan: ClusterPlan | None = None, *children: dict[str, Any], **metadata: Any
) -> FingerprintInputs:
    body = cluster()
    body = {**body, "metadata": {**body["metadata"], **metadata}}
    return FingerprintInputs.of(Live(body, children or (SERVICE,)), plan or plan_of())


def test_the_same_inputs_hold_until_something_falls_due():
    found = fingerprint_of(inputs(), NOW, 60.0)
    assert found.holds(inputs(), NOW + timedelta(seconds=59))
    assert found.requeue_after_seconds(NOW + timedelta(seconds=59)) == 1.0
    assert not found.holds(inputs(), NOW + timedelta(seconds=60))


@pytest.mark.parametrize("due", [None, 2 * MAX_SECONDS])
def test_they_are_compared_again_after_an_hour_at_the_latest(due: float | None):
    found = fingerprint_of(inputs(), NOW, due)
    assert found.holds(inputs(), NOW + timedelta(seconds=MAX_SECONDS / 2 - 1))
    assert not found.holds(inputs(), NOW + timedelta(seconds=MAX_SECONDS))
    assert found.requeue_after_seconds(NOW) is None


def test_not_all_pdclusters_are_compared_again_at_once():
    ends = {fingerprint_of(inputs(uid=f"uid-{number}"), NOW, None).until for number in range(20)}
    assert max(ends) - min(ends) > timedelta(seconds=MAX_SECONDS / 4)


def test_a_status_and_its_events_are_written_apart():
    found = fingerprint_of(inputs(), NOW, 60.0)
    assert found.holds(
        inputs(plan_of(status={"observedGeneration": 9}, requeue_after_seconds=3.0)), NOW
    )


@pytest.mark.parametrize(
    "other",
    [
        inputs(plan_of(serving="0123abcd")),
        inputs(None, child("Service", "chat", metadata={"resourceVersion": "8"})),
        inputs(None, SERVICE, child("Pod", "chat-0")),
        inputs(generation=2),
        inputs(uid="another"),
        inputs(annotations={"pdcluster.io/rotate-ca": "now"}),
    ],
    ids=["plan", "changed-child", "new-child", "generation", "uid", "annotation"],
)
def test_any_other_input_is_compared_again(other: FingerprintInputs):
    found = fingerprint_of(inputs(), NOW, 60.0)
    assert not found.holds(other, NOW)
