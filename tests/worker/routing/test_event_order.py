"""Numbered events of one sender: repeats pass, and after a gap an index is right again [V19]."""

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.routing.event_order import EventOrder, GapCheck
from pdcluster_worker.routing.prefix_index import PrefixIndex


def test_events_are_taken_once_and_in_order() -> None:
    order = EventOrder()

    assert [order.arrival(number) for number in (1, 2, 2, 1, 3)] == [
        *(GapCheck.APPLY, GapCheck.APPLY, GapCheck.SKIP, GapCheck.SKIP, GapCheck.APPLY),
    ]


def test_gap_is_asked_for_once_and_ends_with_everything() -> None:
    order = EventOrder()
    first = [order.arrival(number) for number in (1, 3, 4, 2)]

    assert first == [GapCheck.APPLY, GapCheck.GET_SNAPSHOT, GapCheck.SKIP, GapCheck.SKIP]
    assert [order.arrival(6, is_whole=True), order.arrival(5), order.arrival(7)] == [
        GapCheck.APPLY,
        GapCheck.SKIP,
        GapCheck.APPLY,
    ]


def test_reader_that_comes_late_asks_for_everything() -> None:
    assert EventOrder().arrival(4) is GapCheck.GET_SNAPSHOT
    assert EventOrder().arrival(4, is_whole=True) is GapCheck.APPLY


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.booleans(), st.sampled_from(["once", "lost", "twice"])),
        max_size=40,
    )
)
def test_index_that_follows_is_right_whenever_nothing_is_missing(
    changes: list[tuple[int, bool, str]],
) -> None:
    """Events are lost and repeated at will; a snapshot follows each request for one."""
    truth: set[bytes] = set()
    index, order, requested = PrefixIndex(), EventOrder(), False
    for number, (block, stored, fate) in enumerate(changes, 1):
        name, is_whole = bytes([block]), requested
        (truth.add if stored else truth.discard)(name)
        told = (sorted(truth), []) if is_whole else ([name], []) if stored else ([], [name])
        for _ in range({"once": 1, "lost": 0, "twice": 2}[fate]):
            arrival = order.arrival(number, is_whole=is_whole)
            if arrival is GapCheck.APPLY and is_whole:
                index.snapshot("w", told[0])
            elif arrival is GapCheck.APPLY:
                index.apply("w", *told)
            if arrival is GapCheck.APPLY:
                assert index.hashes("w") == truth
                requested = False
            requested = requested or arrival is GapCheck.GET_SNAPSHOT
