"""[R5]: request groups, virtual queues, their order, and the four operations on them."""

from itertools import permutations
from math import inf
from random import Random

import pytest

from pdcluster_worker.routing.waiting_time.virtual_queue import (
    GroupKey,
    Labels,
    Move,
    RequestGroup,
    VirtualQueue,
    balance,
    best_order,
    by_deadline,
    evict,
    forecasts,
    group_of,
    num_late,
    place,
    pull,
    replan,
    swap,
)


def group(slo: float, count: int, due: float | None = None, model: str = "chat") -> RequestGroup:
    return RequestGroup(GroupKey(model, slo), slo if due is None else due, count)


def queue(*groups: RequestGroup, worker: str = "w0") -> VirtualQueue:
    return VirtualQueue(worker, "chat", groups, swap_seconds=5.0)


def ten_each(of: RequestGroup) -> float:
    return 10.0 * of.num_requests


def test_requests_of_about_the_same_deadline_are_one_group() -> None:
    assert group_of("chat", 430, 100) == group_of("chat", 499.9, 100) == GroupKey("chat", 400)
    assert group_of("chat", 430, 100) != group_of("coder", 430, 100)
    assert group_of("chat", None, 100) == GroupKey("chat", inf)


def test_a_group_that_grows_keeps_its_earliest_deadline() -> None:
    assert group(100, 2, due=50.0).grown(40.0, 3) == group(100, 5, due=40.0)
    assert group(100, 2, due=50.0).grown(90.0) == group(100, 3, due=50.0)


def test_labels_are_bounded() -> None:
    labels = Labels(2)

    assert [labels.label(name) for name in ("a", "b", "c", "a", "d")] == [
        "a",
        "b",
        "other",
        "a",
        "other",
    ]


def test_forecasts_add_up_and_count_swaps() -> None:
    groups = group(100, 2), group(200, 3, model="coder"), group(300, 1, model="coder")

    assert [f.end_seconds for f in forecasts(queue(*groups), ten_each, now=1.0)] == [
        21.0,
        56.0,
        66.0,
    ]


def test_edf_is_kept_while_all_are_in_time() -> None:
    groups = [group(100, 2), group(200, 3), group(300, 1)]

    assert best_order(queue(*groups[::-1]), ten_each, 0.0) == groups


def test_the_best_order_gives_up_the_group_that_makes_others_late() -> None:
    long, first, second = group(60, 8, due=60.0), group(70, 3, due=70.0), group(80, 4, due=80.0)

    assert num_late(queue(long, first, second), ten_each, 0.0) == 15
    assert best_order(queue(long, first, second), ten_each, 0.0) == [first, second, long]


@pytest.mark.parametrize("seed", range(30))
def test_the_best_order_is_as_good_as_the_best_of_all_permutations(seed: int) -> None:
    source = Random(seed)
    groups = [group(100 + i, source.randint(1, 9), due=source.uniform(10, 200)) for i in range(6)]
    least = min(num_late(queue(*order), ten_each, 0.0) for order in permutations(groups))

    assert num_late(queue(*best_order(queue(*groups), ten_each, 0.0)), ten_each, 0.0) == least


def test_the_best_order_is_far_better_than_edf_where_not_all_can_be_in_time() -> None:
    """Requests of random overloaded queues that are late, by order: the comparison of
    docs/waiting-time.md.
    """
    late = {"arrival": 0, "edf": 0, "best": 0}
    for seed in range(60):
        source = Random(seed)
        groups = [
            group(100 + i, source.randint(1, 9), due=source.uniform(40, 300)) for i in range(6)
        ]
        late["arrival"] += num_late(queue(*groups), ten_each, 0.0)
        late["edf"] += num_late(queue(*by_deadline(groups)), ten_each, 0.0)
        late["best"] += num_late(queue(*best_order(queue(*groups), ten_each, 0.0)), ten_each, 0.0)

    assert late["best"] < 0.6 * late["edf"]
    assert late["arrival"] < late["edf"]  # under overload EDF serves first what is late anyway


def test_a_long_queue_gives_up_its_longest_groups() -> None:
    groups = [group(100 + i, 1, due=12.0 * (i + 1)) for i in range(20)]
    blocker = group(50, 1, due=1000.0)
    slow = {id(blocker): 2000.0}
    order = best_order(queue(blocker, *groups), lambda g: slow.get(id(g), 10.0), 0.0)

    assert order == [*groups, blocker]
    early = group(40, 1, due=500.0)
    order = best_order(queue(early, *groups), lambda g: 400.0 if g is early else 10.0, 0.0)
    assert order[-1] is early


def test_pull_takes_what_the_batch_has_room_for_in_the_queues_order() -> None:
    served = queue(group(100, 5), group(200, 9))

    assert pull(served, num_running=0, waiting=[5, 9]) == [5, 5]
    assert pull(served, num_running=9, waiting=[5, 9]) == [1, 0]
    assert pull(served, num_running=10, waiting=[5, 9]) == [0, 0]
    assert pull(
        queue(group(100, 5, model="coder"), group(200, 9)), num_running=0, waiting=[5, 9]
    ) == [0, 0]


def test_evict_takes_back_what_is_overtaken_and_runs() -> None:
    first, second, third = group(100, 5), group(200, 9), group(300, 2)
    served = queue(first, second, third)

    assert evict(served, [first, second, third], running=[first]) == []
    assert evict(served, [second, first, third], running=[first]) == [first]
    assert evict(served, [second, first, third], running=[second]) == []
    assert evict(served, [third, first, second], running=[first, second]) == [first, second]


def test_swap_asks_for_the_model_of_the_head_once_nothing_runs() -> None:
    other = queue(group(100, 5, model="coder"))

    assert swap(other, num_running=0) == "coder"
    assert swap(other, num_running=1) is None
    assert swap(queue(group(100, 5)), num_running=0) is None
    assert swap(queue(), num_running=0) is None


def test_replan_keeps_the_order_until_a_deadline_is_violated() -> None:
    late_first = [group(300, 1), group(100, 2)]
    assert replan(queue(*late_first), ten_each, 0.0) == late_first

    assert replan(queue(*late_first), ten_each, 75.0) == late_first[::-1]


def test_place_prefers_the_worker_where_nothing_becomes_late() -> None:
    busy, idle = queue(group(90, 8), worker="busy"), queue(group(900, 9), worker="slack")

    assert place([busy, idle], group(30, 2), ten_each, 0.0) == "slack"
    assert place([queue(worker="a"), busy], group(30, 2), ten_each, 0.0) == "a"
    with pytest.raises(ValueError, match="at least one worker"):
        place([], group(30, 2), ten_each, 0.0)


def test_balance_moves_the_group_that_would_be_late_to_where_it_is_not() -> None:
    late = group(100, 6)
    crowded, idle = queue(group(60, 5), late, worker="w0"), queue(worker="w1")

    assert balance([crowded, idle], ten_each, 0.0) == Move(late, "w0", "w1")
    assert balance([queue(group(60, 5), worker="w0"), idle], ten_each, 0.0) is None
    full = queue(group(70, 7), worker="w1")
    assert balance([crowded, full], ten_each, 0.0) is None
