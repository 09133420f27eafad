"""One API key's slow constraints do not hold up those of another."""

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.structured_output.compile_queue import CompileQueue, Key


def key(text: str) -> Key:
    return "regex", text, False


def taken(queue: CompileQueue) -> tuple[str, str] | None:
    found = queue.take()
    return None if found is None else (found[0], found[1][1])


def test_one_tenant_is_served_in_the_order_of_arrival():
    queue = CompileQueue(3)
    for text in "abc":
        queue.add("", key(text))

    assert [taken(queue), taken(queue), taken(queue)] == [("", "a"), ("", "b"), None]
    queue.done("", 1.0)
    assert taken(queue) == ("", "c")


def test_a_slot_is_left_for_another_tenant():
    queue = CompileQueue(3)
    for text in "abcd":
        queue.add("slow", key(text))
    assert [taken(queue), taken(queue), taken(queue)] == [("slow", "a"), ("slow", "b"), None]
    queue.add("other", key("x"))

    assert taken(queue) == ("other", "x")


def test_the_tenant_that_took_the_fewest_seconds_is_next():
    queue = CompileQueue(2)
    for tenant, texts in (("slow", "abc"), ("quick", "xyz")):
        for text in texts:
            queue.add(tenant, key(text))
    order = []
    for _ in range(6):
        tenant, text = taken(queue) or ("", "")
        order.append(text)
        queue.done(tenant, 20.0 if tenant == "slow" else 0.1)

    assert order == ["a", "x", "y", "z", "b", "c"]


def test_a_tenant_that_comes_back_does_not_make_up_for_the_time_it_was_away():
    queue = CompileQueue(2)
    queue.add("here", key("a"))
    for text in ("b", "c", "d"):
        queue.add("here", key(text))
        assert taken(queue) is not None
        queue.done("here", 5.0)
    for text in "xyz":
        queue.add("new", key(text))
    queue.add("here", key("e"))
    order = []
    for _ in range(3):
        tenant, text = taken(queue) or ("", "")
        order.append(text)
        queue.done(tenant, 4.0)

    assert order == ["x", "y", "d"]


def test_one_constraint_of_two_tenants_is_taken_once_at_the_first_turn():
    queue = CompileQueue(3)
    queue.add("one", key("a"))
    queue.add("one", key("same"))
    queue.add("two", key("same"))

    assert [taken(queue), taken(queue), taken(queue)] == [("one", "a"), ("two", "same"), None]


def test_a_discarded_constraint_is_not_taken():
    queue = CompileQueue(2)
    queue.add("one", key("a"))
    queue.discard(key("a"))
    queue.discard(key("b"))

    assert queue.take() is None


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from("pqr"), st.sampled_from("abcdef")), max_size=30),
)
def test_everything_that_waits_is_taken_in_the_end(num_slots, arrivals):
    queue = CompileQueue(num_slots)
    under_way, left = [], {text for _, text in arrivals}
    for tenant, text in arrivals:
        queue.add(tenant, key(text))
    while left:
        found = queue.take()
        if found is None or len(under_way) == num_slots:
            assert under_way, "all slots are free, and nothing is taken"
            queue.done(under_way.pop(0), 1.0)
        if found is not None:
            under_way.append(found[0])
            left.remove(found[1][1])
