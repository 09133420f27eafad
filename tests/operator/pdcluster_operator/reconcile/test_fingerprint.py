"""Reconciles that need not compare the children again, or observe anything: only with the very
inputs that asked for no write.
"""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pdcluster_api.apiserver.observe import Live
from pdcluster_api.plan.result import ClusterPlan
from pdcluster_operator.reconcile.session import MAX_SECONDS, Fingerprint, ObservedInputs, digest_of
from tests.operator.bodies import child, cluster
from tests.operator.pdcluster_api.plan.clusters import NOW as STAMP
from tests.operator.pdcluster_api.plan.clusters import make_cluster, plan_all, running

NOW = datetime(2026, 1, 2, tzinfo=UTC)
SERVICE = child("Service", "chat", metadata={"resourceVersion": "7"})
MINUTE = timedelta(minutes=1)
INPUTS = ObservedInputs(change=7, etcd=("records",), faults={}, key_secret=None)
PLAN: ClusterPlan = plan_all(make_cluster(), running(make_cluster()), STAMP).plan


def live_with(*children: dict[str, Any], **metadata: Any) -> Live:
    body = cluster()
    return Live({**body, "metadata": {**body["metadata"], **metadata}}, children or (SERVICE,))


def fingerprint(seconds: float | None, **metadata: Any) -> Fingerprint:
    return Fingerprint.of(live_with(**metadata), PLAN, NOW, seconds)


SAME = digest_of(live_with(), PLAN)


def test_the_same_inputs_hold_until_something_falls_due():
    found = fingerprint(60.0)
    assert found.holds(SAME, NOW + timedelta(seconds=59))
    assert found.requeue_after_seconds(NOW + timedelta(seconds=59)) == 1.0
    assert not found.holds(SAME, NOW + timedelta(seconds=60))


@pytest.mark.parametrize("due", [None, 2 * MAX_SECONDS])
def test_they_are_compared_again_after_an_hour_at_the_latest(due: float | None):
    found = fingerprint(due)
    assert found.holds(SAME, NOW + timedelta(seconds=MAX_SECONDS / 2 - 1))
    assert not found.holds(SAME, NOW + timedelta(seconds=MAX_SECONDS))
    assert found.requeue_after_seconds(NOW) is None


def test_not_all_pdclusters_are_compared_again_at_once():
    ends = {fingerprint(None, uid=f"uid-{number}").until for number in range(20)}
    assert max(ends) - min(ends) > timedelta(seconds=MAX_SECONDS / 4)


def test_commands_count_in_any_order():
    pods = [f"chat-decode-{number}" for number in range(50)]
    forward, backward = (replace(PLAN, commands=frozenset(each)) for each in (pods, reversed(pods)))
    assert digest_of(live_with(), forward) == digest_of(live_with(), backward) != SAME


@pytest.mark.parametrize(
    "other",
    [
        digest_of(live_with(), replace(PLAN, serving="0123abcd")),
        digest_of(live_with(child("Service", "chat", metadata={"resourceVersion": "8"})), PLAN),
        digest_of(live_with(SERVICE, child("Pod", "chat-0")), PLAN),
        digest_of(live_with(generation=2), PLAN),
        digest_of(live_with(uid="another"), PLAN),
        digest_of(live_with(annotations={"pdcluster.io/rotate-ca": "now"}), PLAN),
    ],
    ids=["plan", "changed-child", "new-child", "generation", "uid", "annotation"],
)
def test_any_other_input_is_compared_again(other: bytes):
    assert not fingerprint(60.0).holds(other, NOW)


def test_nothing_is_observed_until_something_falls_due():
    found = fingerprint(60.0)
    assert found.rest_seconds(NOW) == 0.0
    assert found.at_rest(INPUTS, None, NOW).rest_seconds(NOW) == 60.0
    assert found.at_rest(INPUTS, 5.0, NOW).rest_seconds(NOW) == 5.0
    assert found.at_rest(INPUTS, 90.0, NOW).rest_seconds(NOW) == 60.0
    assert found.at_rest(INPUTS, None, NOW).rest_seconds(NOW + 2 * MINUTE) == 0.0
