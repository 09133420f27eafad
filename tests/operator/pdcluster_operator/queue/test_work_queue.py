"""The work queue, driven with a clock value."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_operator.queue.work_queue import WorkQueue
from pdcluster_schema.backoff import Backoff


def make_queue() -> WorkQueue[str]:
    return WorkQueue(Backoff(first=1.0, most=8.0))


def test_keys_come_in_the_order_in_which_they_became_due():
    queue = make_queue()
    for key in ("a", "b", "a", "c"):
        queue.add(key, 0.0)
    assert [queue.take(0.0) for _ in range(4)] == ["a", "b", "c", None]


def test_a_key_in_work_is_not_handed_out_again_until_its_work_ended():
    queue = make_queue()
    queue.add("a", 0.0)
    assert queue.take(0.0) == "a"
    for _ in range(3):
        queue.add("a", 1.0)
    assert queue.take(1.0) is None
    queue.succeeded("a", 2.0)
    assert [queue.take(2.0), queue.take(2.0)] == ["a", None]  # three adds meanwhile are one


def test_a_failed_key_waits_twice_as_long_each_time_up_to_the_bound_and_success_forgets_it():
    queue = make_queue()
    delays, now = [], 0.0
    queue.add("a", now)
    for _ in range(5):
        assert queue.take(now) == "a"
        delays.append(queue.failed("a", now))
        assert queue.take(now + delays[-1] - 0.01) is None
        now += delays[-1]
    assert delays == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert queue.take(now) == "a"
    queue.succeeded("a", now)
    queue.add("a", now)
    queue.take(now)
    assert queue.failed("a", now) == 1.0


def test_the_backoff_of_many_failures_does_not_overflow():
    assert Backoff(first=1.0, most=8.0).after(100_000) == 8.0


def test_an_add_while_failing_work_goes_on_is_due_at_once():
    queue = make_queue()
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.add("a", 0.5)
    queue.failed("a", 1.0)
    assert queue.take(1.0) == "a"


def test_the_earlier_of_two_scheduled_times_counts_and_taking_forgets_both():
    queue = make_queue()
    queue.add_at("a", 9.0)
    queue.add_at("a", 5.0)
    queue.add_at("a", 7.0)
    assert (queue.next_at(), queue.take(4.9), queue.take(5.0)) == (5.0, None, "a")
    queue.succeeded("a", 6.0)
    assert (queue.next_at(), queue.take(100.0)) == (None, None)


def test_a_key_that_has_more_to_do_at_once_is_the_next():
    queue = make_queue()
    for key in ("a", "b", "c"):
        queue.add(key, 0.0)
    queue.take(0.0)
    queue.add("a", 0.5)
    queue.succeeded("a", 1.0, requeue_after_seconds=0.0)
    assert [queue.take(1.0) for _ in range(4)] == ["a", "b", "c", None]


def test_look_again_makes_a_key_due_by_itself():
    queue = make_queue()
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.succeeded("a", 1.0, requeue_after_seconds=15.0)
    assert (queue.take(15.9), queue.take(16.0)) == (None, "a")


def test_waits_and_works_are_measured_from_when_they_began():
    queue = make_queue()
    assert queue.stood_still(5.0) == 0.0
    queue.add("a", 1.0)
    queue.add("b", 2.0)
    queue.add("a", 3.0)
    assert (queue.depth, queue.stood_still(5.0)) == (2, 4.0)
    queue.take(5.0)
    assert (queue.depth, queue.stood_still(8.0), list(queue.in_work(8.0))) == (1, 3.0, [("a", 3.0)])
    queue.succeeded("a", 9.0)
    assert queue.stood_still(9.5) == 0.5


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_no_add_is_ever_lost_and_no_key_is_worked_on_twice_at_once(seed: int, num_workers: int):
    chance = random.Random(seed)
    queue = make_queue()
    keys, now, working = "abcd", 0.0, set[str]()
    pending = set[str]()  # added since the key was last taken
    for _ in range(200):
        now += chance.random()
        match chance.randrange(4):
            case 0:
                key = chance.choice(keys)
                queue.add(key, now)
                pending.add(key)
            case 1 if len(working) < num_workers and (key := queue.take(now)) is not None:
                assert key not in working
                working.add(key)
                pending.discard(key)
            case 2 if working:
                key = working.pop()
                queue.succeeded(key, now)
            case 3 if working:
                key = working.pop()
                queue.failed(key, now)
                pending.add(key)
    for key in working:
        queue.succeeded(key, now)
    now += 100.0
    left = set(iter(lambda: queue.take(now), None))
    assert left >= pending


@pytest.mark.parametrize("method", ["succeeded", "failed"])
def test_ending_work_that_was_not_taken_is_a_fault_of_ours(method: str):
    with pytest.raises(KeyError):
        getattr(make_queue(), method)("a", 0.0)


def test_times_that_no_longer_count_are_not_kept():
    queue = make_queue()
    for now in range(1000):
        queue.add("a", now)
        assert queue.take(now) == "a"
        queue.succeeded("a", now, requeue_after_seconds=1e6)
    assert queue.next_at() == 999 + 1e6
    assert len(queue._times) < 100
