"""[R5]: request groups, forecasts in their order, and which of them are deferred."""

from collections.abc import Sequence
from itertools import permutations
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.routing.waiting_time.request_groups import (
    MAX_EXACT,
    Labels,
    RequestGroup,
    forecasts,
    in_order,
    least_late,
    num_late,
    replan,
    slo_class,
)


def group(
    name: str, seconds: float, due: float, *, count: int = 1, priority: int = 0, able: bool = True
) -> RequestGroup:
    return RequestGroup(
        name,
        count,
        first_due_seconds=due,
        last_due_seconds=due,
        priority=priority,
        seconds=seconds,
        work_seconds=seconds,
        may_be_deferred=able,
    )


def drawn(seed: int, count: int = 6) -> list[RequestGroup]:
    source = Random(seed)
    return [
        group(str(i), 10.0 * (size := source.randint(1, 9)), source.uniform(40, 300), count=size)
        for i in range(count)
    ]


def names(groups: Sequence[RequestGroup]) -> list[str]:
    return [each.name for each in groups]


def test_deadlines_in_one_step_are_one_class() -> None:
    assert slo_class(430, 100) == slo_class(499.9, 100) == "400s"
    assert slo_class(20, 100) == "100s"
    assert slo_class(None, 100) == "none"


def test_labels_are_bounded() -> None:
    labels = Labels(2)

    assert [labels.label(name) for name in "abcad"] == ["a", "b", "other", "a", "other"]


def test_groups_go_by_priority_then_deferral_then_deadline() -> None:
    groups = [
        group("late", 1, 5),
        group("next", 1, 9),
        group("last", 1, 99),
        group("low", 1, 1, priority=1),
        group("high", 1, 100, priority=-1),
    ]

    assert names(in_order(groups, {"late"})) == ["high", "next", "last", "late", "low"]


def test_forecasts_add_up_the_work_before_and_end_with_the_last_answer() -> None:
    long = RequestGroup("long", 2, 1.0, inf, seconds=30.0, work_seconds=20.0)
    groups = [long, group("next", 5, 9.0)]

    assert [(g.name, end) for g, end in forecasts(groups, (), 100.0)] == [
        ("long", 130.0),
        ("next", 125.0),
    ]


def test_nothing_is_deferred_while_all_are_in_time() -> None:
    groups = [group("a", 20, 20), group("b", 30, 50)]

    assert least_late(groups, 0.0) == replan(groups, frozenset(), 0.0) == frozenset()


def test_the_group_that_makes_others_late_is_deferred() -> None:
    groups = [
        group("long", 80, 60, count=8),
        group("first", 30, 70, count=3),
        group("second", 40, 80, count=4),
    ]

    assert num_late(groups, (), 0.0) == 15
    assert least_late(groups, 0.0) == {"long"}


def test_a_group_without_deadline_makes_way_and_is_never_late() -> None:
    groups = [RequestGroup("none", 9, 5.0, seconds=50, work_seconds=50), group("a", 20, 30)]

    assert least_late(groups, 0.0) == {"none"}
    assert num_late(groups, {"none"}, 0.0) == 0


@pytest.mark.parametrize("seed", range(30))
def test_no_order_of_the_groups_has_fewer_late_requests(seed: int) -> None:
    groups = drawn(seed)
    least = min(_late_in(order) for order in permutations(groups))

    assert num_late(groups, least_late(groups, 0.0), 0.0) == least


def _late_in(order: Sequence[RequestGroup]) -> int:
    end, late = 0.0, 0
    for each in order:
        end += each.seconds
        late += each.num_requests if end > each.last_due_seconds else 0
    return late


def test_deferring_is_far_better_than_edf_where_not_all_can_be_in_time() -> None:
    """Late requests of random overloaded queues: the comparison of docs/waiting-time.md."""
    edf = sum(num_late(drawn(seed), (), 0.0) for seed in range(60))
    best = sum(num_late(drawn(seed), least_late(drawn(seed), 0.0), 0.0) for seed in range(60))

    assert best < 0.6 * edf


def test_of_many_groups_those_with_the_longest_answers_are_deferred() -> None:
    groups = [group(str(i), 10, 12.0 * (i + 1)) for i in range(20)]
    early = group("early", 400, 5.0)

    assert len(groups) > MAX_EXACT
    assert least_late([early, *groups], 0.0) == {"early"}


def test_a_plan_is_kept_until_another_has_fewer_late_requests() -> None:
    groups = [group("a", 20, 21), group("b", 20, 25)]

    assert least_late(groups, 0.0) == frozenset()
    assert replan(groups, frozenset({"a"}), 0.0) == {"a"}  # one of both is late either way
    assert replan(groups, frozenset(), 2.0) == {"a"}  # and now both would be
    assert replan(groups, frozenset({"a"}), 8.0) == {"a"}  # both are, whatever is done


def test_a_group_that_has_waited_long_enough_is_deferred_no_more() -> None:
    groups = [group("a", 20, 15, able=False), group("b", 20, 25)]

    assert replan(groups, frozenset({"a"}), 0.0) == frozenset()
    assert "a" not in least_late(groups, 0.0)


@given(st.integers(0, 10**6), st.integers(1, 14), st.floats(0, 400), st.data())
def test_a_plan_never_adds_late_requests(seed: int, count: int, now: float, data: st.DataObject):
    groups = drawn(seed, count)
    before = frozenset(data.draw(st.sets(st.sampled_from(names(groups)))))
    after = replan(groups, before, now)

    assert num_late(groups, after, now) <= num_late(groups, before, now)
    assert after <= set(names(groups))
