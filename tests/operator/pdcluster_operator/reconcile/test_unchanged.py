"""Reconciles of a PDCluster at rest: only for what its last one started from, and until something
falls due.
"""

from datetime import UTC, datetime, timedelta

import pytest

from pdcluster_operator.reconcile.unchanged import Unchanged

NOW = datetime(2026, 1, 2, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
REST = Unchanged(change=7, etcd=("records",), faults={}, key_secret=None, until=NOW + MINUTE)


@pytest.mark.parametrize(
    ("change", "etcd", "after", "holds"),
    [
        (7, ("records",), timedelta(), True),
        (8, ("records",), timedelta(), False),
        (7, ("others",), timedelta(), False),
        (7, None, timedelta(), False),
        (7, ("records",), MINUTE, False),
    ],
    ids=["same", "object changed", "etcd changed", "etcd in motion", "due"],
)
def test_it_holds_for_the_same_facts_alone(
    change: int, etcd: tuple[object, ...] | None, after: timedelta, holds: bool
):
    assert REST.holds(change, etcd, NOW + after) is holds


def test_it_ends_with_what_falls_due_first():
    assert REST.due_within(None, NOW).seconds_left(NOW) == 60.0
    assert REST.due_within(5.0, NOW).seconds_left(NOW) == 5.0
    assert REST.due_within(90.0, NOW).seconds_left(NOW) == 60.0
    assert REST.seconds_left(NOW + 2 * MINUTE) == 0.0
