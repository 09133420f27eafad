"""The line of requests that wait for a credit, against a list that is sorted each time."""

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.routing.credit_queue import CreditQueue

ADD = st.tuples(st.just("add"), st.sampled_from("abcdef"), st.integers(1, 100), st.integers(-1, 1))
DISCARD = st.tuples(st.just("discard"), st.sampled_from("abcdef"), st.just(0), st.just(0))


def test_queue_orders_by_priority_then_arrival() -> None:
    queue = CreditQueue()
    for request_id, priority in [("late", 1), ("first", 0), ("second", 0), ("urgent", -1)]:
        queue.add(request_id, tokens=10, priority=priority)

    assert queue.heads(10) == ["urgent", "first", "second", "late"]
    assert queue.heads(2) == ["urgent", "first"]
    assert queue.heads(0) == []
    assert (queue.num_requests, queue.num_tokens) == (4, 40)


def test_queue_has_a_line_of_its_own_for_each_worker_that_is_named() -> None:
    queue = CreditQueue()
    for number in range(3):
        queue.add(f"a{number}", tokens=10, priority=0, only="a")
    queue.add("first", tokens=10, priority=0)
    queue.add("b0", tokens=10, priority=-1, only="b")
    queue.add("second", tokens=10, priority=0)

    assert queue.heads(1) == ["b0", "a0", "first"]
    queue.discard("b0")
    queue.discard("a0")
    assert queue.heads(1) == ["a1", "first"]
    assert (queue.num_requests, queue.num_tokens) == (4, 40)


def test_queue_repeated_add_keeps_place_and_size() -> None:
    queue = CreditQueue()
    queue.add("a", 10, 0)
    queue.add("b", 20, 0)
    queue.add("a", 99, 5)

    assert queue.heads(2) == ["a", "b"]
    assert (queue.num_tokens, queue.tokens("a")) == (30, 10)


def test_queue_discard_of_unknown_request_is_no_op() -> None:
    queue = CreditQueue()
    queue.add("a", 10, 0)
    queue.discard("b")

    assert "a" in queue
    assert "b" not in queue
    assert queue.num_requests == 1


@given(st.lists(ADD | DISCARD, max_size=40))
def test_queue_equals_a_sorted_list(steps: list[tuple[str, str, int, int]]) -> None:
    queue = CreditQueue()
    model: dict[str, tuple[int, int, int]] = {}  # id -> (priority, arrival, tokens)
    for arrival, (verb, request_id, tokens, priority) in enumerate(steps):
        if verb == "add":
            queue.add(request_id, tokens, priority)
            model.setdefault(request_id, (priority, arrival, tokens))
        else:
            queue.discard(request_id)
            model.pop(request_id, None)

        assert queue.heads(100) == sorted(model, key=lambda name: model[name])
        assert queue.num_requests == len(model)
        assert queue.num_tokens == sum(tokens for _, _, tokens in model.values())
