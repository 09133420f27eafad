"""Events for changes, each once, and warnings only where a user should look."""

from dataclasses import replace

import pytest

from pdcluster_api.plan.observed.state import Observed
from pdcluster_api.plan.status.events import events
from pdcluster_schema import conditions as words
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.plan.clusters import (
    NOW,
    failing_pod,
    identity,
    make_cluster,
    plan_all,
    running,
    workload,
)

CLUSTER, NEXT = make_cluster(), make_cluster(engine=65)
A, B = revision_of(CLUSTER.spec), revision_of(NEXT.spec)
READY = plan_all(CLUSTER, running(CLUSTER), NOW).status
BOTH = [*running(CLUSTER).workloads, *running(NEXT).workloads]


def news(cluster, observed):
    """(reason, is a warning) of everything that happened since the cluster was ready, unless the
    observation says otherwise.
    """
    observed = observed if observed.status else replace(observed, status=READY)
    return [(each.reason, each.warning) for each in plan_all(cluster, observed, NOW).events]


def decode(ready=2, **fields):
    return running(
        CLUSTER,
        workloads=[
            workload(identity(A, "prefill"), 1),
            workload(identity(A), 2, ready=ready, **fields),
        ],
    )


def ill(reason, ready=1):
    return decode(ready=ready, pods=(failing_pod(identity(A), 1, reason),))


def test_nothing_changed():
    assert news(CLUSTER, running(CLUSTER)) == []


def test_it_becomes_ready():
    first = plan_all(CLUSTER, Observed(1, {}, running(CLUSTER).discovery), NOW)
    assert first.events == ()  # its creation is no event
    assert news(CLUSTER, running(CLUSTER, status=first.status)) == [
        (words.READY, False),
        (words.ANSWERING, False),
    ]


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (decode(ready=1), [(words.STARTING, False)]),
        (decode(ready=0), [(words.STARTING, False), (words.NOT_ANSWERING, True)]),
        (ill(words.CRASH_LOOPING), [(words.CRASH_LOOPING, True)]),
        (ill(words.UNSCHEDULABLE), [(words.UNSCHEDULABLE, True)]),
        (ill(words.DOWNLOADING_MODEL), [(words.DOWNLOADING_MODEL, False)]),
    ],
)
def test_it_is_no_longer_ready(observed, expected):
    assert news(CLUSTER, observed) == expected


def test_another_reason_is_news_and_the_same_one_is_not():
    crashing = plan_all(CLUSTER, replace(ill(words.CRASH_LOOPING), status=READY), NOW).status
    assert news(CLUSTER, replace(ill(words.CRASH_LOOPING), status=crashing)) == []
    assert news(CLUSTER, replace(ill(words.IMAGE_NOT_PULLED), status=crashing)) == [
        (words.IMAGE_NOT_PULLED, True)
    ]
    assert news(CLUSTER, replace(ill(words.DOWNLOADING_MODEL), status=crashing)) == []


def test_a_roll_out_starts_switches_and_ends():
    started = plan_all(NEXT, running(CLUSTER, status=READY), NOW)
    assert [each.reason for each in started.events] == [words.ROLLOUT_STARTED]
    switched = plan_all(NEXT, running(CLUSTER, status=started.status, workloads=BOTH), NOW)
    assert [each.reason for each in switched.events] == [words.ROLLOUT_SWITCHED]
    assert news(NEXT, running(NEXT, status=switched.status, workloads=BOTH)) == [
        (words.READY, False)
    ]


def test_a_dropped_roll_out():
    started = plan_all(NEXT, running(CLUSTER, status=READY), NOW).status
    assert news(CLUSTER, running(CLUSTER, status=started)) == [
        (words.ROLLOUT_DROPPED, False),
        (words.READY, False),
    ]


def test_a_spoilt_status_makes_no_noise():
    assert events({"conditions": 3, "roles": "x", "revision": {}}, {**READY}) == events(
        {}, {**READY}
    )
