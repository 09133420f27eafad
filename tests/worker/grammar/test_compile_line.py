"""One API key's slow constraints do not hold up those of another."""

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.grammar.line import CompileLine, Key


def key(text: str) -> Key:
    return "regex", text, False


def taken(line: CompileLine) -> tuple[str, str] | None:
    found = line.take()
    return None if found is None else (found[0], found[1][1])


def test_one_tenant_is_served_in_the_order_of_arrival():
    line = CompileLine(3)
    for text in "abc":
        line.add("", key(text))

    assert [taken(line), taken(line), taken(line)] == [("", "a"), ("", "b"), None]
    line.done("", 1.0)
    assert taken(line) == ("", "c")


def test_a_slot_is_left_for_another_tenant():
    line = CompileLine(3)
    for text in "abcd":
        line.add("slow", key(text))
    assert [taken(line), taken(line), taken(line)] == [("slow", "a"), ("slow", "b"), None]
    line.add("other", key("x"))

    assert taken(line) == ("other", "x")


def test_the_tenant_that_took_the_fewest_seconds_is_next():
    line = CompileLine(2)
    for tenant, texts in (("slow", "abc"), ("quick", "xyz")):
        for text in texts:
            line.add(tenant, key(text))
    order = []
    for _ in range(6):
        tenant, text = taken(line) or ("", "")
        order.append(text)
        line.done(tenant, 20.0 if tenant == "slow" else 0.1)

    assert order == ["a", "x", "y", "z", "b", "c"]


def test_a_tenant_that_comes_back_does_not_make_up_for_the_time_it_was_away():
    line = CompileLine(2)
    line.add("here", key("a"))
    for text in ("b", "c", "d"):
        line.add("here", key(text))
        assert taken(line) is not None
        line.done("here", 5.0)
    for text in "xyz":
        line.add("new", key(text))
    line.add("here", key("e"))
    order = []
    for _ in range(3):
        tenant, text = taken(line) or ("", "")
        order.append(text)
        line.done(tenant, 4.0)

    assert order == ["x", "y", "d"]


def test_one_constraint_of_two_tenants_is_taken_once_at_the_first_turn():
    line = CompileLine(3)
    line.add("one", key("a"))
    line.add("one", key("same"))
    line.add("two", key("same"))

    assert [taken(line), taken(line), taken(line)] == [("one", "a"), ("two", "same"), None]


def test_a_discarded_constraint_is_not_taken():
    line = CompileLine(2)
    line.add("one", key("a"))
    line.discard(key("a"))
    line.discard(key("b"))

    assert line.take() is None


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from("pqr"), st.sampled_from("abcdef")), max_size=30),
)
def test_everything_that_waits_is_taken_in_the_end(num_slots, arrivals):
    line = CompileLine(num_slots)
    under_way, left = [], {text for _, text in arrivals}
    for tenant, text in arrivals:
        line.add(tenant, key(text))
    while left:
        found = line.take()
        if found is None or len(under_way) == num_slots:
            assert under_way, "all slots are free, and nothing is taken"
            line.done(under_way.pop(0), 1.0)
        if found is not None:
            under_way.append(found[0])
            left.remove(found[1][1])
