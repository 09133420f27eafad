"""The prefix indexes, by events and by what was sent [Y11], and the order of events [V19]."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.routing.prefix_index import (
    RECENT_SECONDS,
    EventOrder,
    GapCheck,
    PrefixIndex,
    RecentPrefixes,
)

WORKERS = st.sampled_from(["p0", "p1"])
HASHES = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("snapshot"), WORKERS, st.lists(HASHES), st.just([])),
        st.tuples(st.just("apply"), WORKERS, st.lists(HASHES), st.lists(HASHES)),
        st.tuples(st.just("drop"), WORKERS, st.just([]), st.just([])),
    ),
    max_size=30,
)


def test_hashes_are_a_snapshot_of_now() -> None:
    index = PrefixIndex()
    index.apply("p0", stored=[b"a", b"b"], removed=[])
    before = index.hashes("p0")
    index.apply("p0", stored=[], removed=[b"a"])

    assert before == {b"a", b"b"}
    assert index.hashes("p0") == {b"b"}
    assert index.hashes("never") == frozenset()


@pytest.mark.parametrize("num_known", [1, 3, 4, 5, 35, 36, 37, 99, 100])
def test_match_all_ends_where_a_worker_does(num_known: int) -> None:
    blocks = [bytes([number]) for number in range(100)]
    index = PrefixIndex()
    index.snapshot("p0", blocks[:num_known])
    index.snapshot("p1", blocks)

    assert index.match_all(blocks) == {"p0": num_known, "p1": 100}


def test_blocks_of_the_same_workers_share_memory() -> None:
    index = PrefixIndex()
    blocks = [number.to_bytes(4, "big") for number in range(1000)]
    for name in range(40):
        index.apply(f"p{name}", blocks, [])

    assert len({id(mask) for mask in index._table.values()}) == 1


def test_a_worker_that_takes_the_place_of_another_has_none_of_its_blocks() -> None:
    index = PrefixIndex()
    for name in range(200):  # each one's blocks are cleared, and its bit is used again
        index.snapshot(f"w{name}", [b"a", bytes([name])])
        index.snapshot("stays", [b"a"])
        index.drop(f"w{name}")
        index.apply("stays", [], [])
        index.apply("new", [], [])

        assert index.match_all([b"a"]) == {"stays": 1}
        assert index.match("new", [b"a"]) == 0
    for _ in range(3):
        index.apply("stays", [], [])
    assert len(index) == 1


def test_index_is_bounded_and_forgets_what_was_noted_first() -> None:
    index = PrefixIndex(max_blocks=1000)
    blocks = [number.to_bytes(4, "big") for number in range(5000)]
    for start in range(0, 5000, 50):
        index.apply("p0", blocks[start : start + 50], [])
        assert len(index) <= 1000

    assert index.match("p0", blocks[-500:]) == 500
    assert index.match("p0", blocks[:1]) == 0


def test_index_bounds_a_snapshot_that_is_larger() -> None:
    index = PrefixIndex(max_blocks=10)
    index.snapshot("p0", [number.to_bytes(4, "big") for number in range(5000)])

    assert 0 < len(index) <= 10


@given(STEPS, st.lists(HASHES, max_size=6))
def test_index_equals_a_naive_model(
    steps: list[tuple[str, str, list[bytes], list[bytes]]], prompt: list[bytes]
) -> None:
    index = PrefixIndex()
    model: dict[str, list[bytes]] = {}
    for verb, worker, stored, removed in steps:
        if verb == "snapshot":
            index.snapshot(worker, stored)
            model[worker] = list(stored)
        elif verb == "apply":
            index.apply(worker, stored, removed)
            model[worker] = [
                block for block in model.get(worker, []) + stored if block not in removed
            ]
        else:
            index.drop(worker)
            model.pop(worker, None)

        for name in ("p0", "p1"):
            expected = max(
                n
                for n in range(len(prompt) + 1)
                if all(block in model.get(name, []) for block in prompt[:n])
            )
            assert index.match(name, prompt) == expected
            assert index.match_all(prompt).get(name, 0) == expected


A, B, C = b"a", b"b", b"c"


def test_recent_prefixes_last_120_seconds_by_default() -> None:
    recent = RecentPrefixes()
    recent.note("d0", [A], now=0.0)

    assert RECENT_SECONDS == 120.0
    assert recent.match_all([A], now=120.0) == {"d0": 1}
    assert recent.match_all([A], now=120.1) == {}


def test_recent_prefixes_count_leading_blocks_only() -> None:
    recent = RecentPrefixes()
    recent.note("d0", [A, B, C], now=0.0)
    recent.note("d1", [B, C], now=0.0)

    assert recent.match_all([A, B, b"x", C], now=1.0) == {"d0": 2}
    assert recent.match_all([], now=1.0) == {}


def test_recent_prefix_sent_again_stays() -> None:
    recent = RecentPrefixes(seconds=10.0)
    recent.note("d0", [A], now=0.0)
    recent.note("d0", [A], now=8.0)
    recent.note("d1", [B], now=12.0)  # what is older than 10 seconds goes now

    assert recent.match_all([A], now=15.0) == {"d0": 1}
    assert len(recent) == 2


def test_recent_prefixes_within_fewer_seconds() -> None:
    recent = RecentPrefixes()
    recent.note("d0", [A], now=0.0)
    recent.note("d1", [A], now=9.0)

    assert recent.match_all([A], now=10.0, within=2.0) == {"d1": 1}


def test_recent_prefixes_of_a_worker_that_goes_are_dropped() -> None:
    recent = RecentPrefixes()
    recent.note("d0", [A, B], now=0.0)
    recent.note("d1", [A], now=0.0)
    recent.drop("d0", now=1.0)
    recent.drop("never", now=1.0)
    assert recent.match_all([A, B], now=2.0) == {"d1": 1}

    recent.note("d0", [A], now=3.0)
    assert recent.match_all([A, B], now=4.0) == {"d0": 1, "d1": 1}


def test_recent_prefixes_are_bounded_and_forget_the_oldest() -> None:
    recent = RecentPrefixes(max_blocks=2)
    for number, block in enumerate((A, B, C)):
        recent.note("d0", [block], now=float(number))

    assert len(recent) == 2
    assert recent.match_all([A], now=3.0) == {}
    assert recent.match_all([C], now=3.0) == {"d0": 1}


def test_events_are_taken_once_and_in_order() -> None:
    order = EventOrder()

    assert [order.arrival(number) for number in (1, 2, 2, 1, 3)] == [
        *(GapCheck.APPLY, GapCheck.APPLY, GapCheck.SKIP, GapCheck.SKIP, GapCheck.APPLY),
    ]


def test_gap_requests_one_snapshot_and_ends_with_it() -> None:
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


BLOCKS = [bytes([number]) * 32 for number in range(10)]


def test_workers_of_a_store_have_credit_for_one_anothers_blocks():
    index = PrefixIndex()
    index.apply("a", BLOCKS[:8], ())
    index.apply("b", BLOCKS[:2], ())
    index.apply("alone", BLOCKS[:2], ())
    for worker in ("a", "b", "new"):
        index.share(worker, "store")
    assert index.match_all(BLOCKS) == {"a": 8, "b": 5, "new": 4, "alone": 2}
    assert [index.match(worker, BLOCKS) for worker in ("a", "b", "new", "alone")] == [8, 5, 4, 2]
    assert index.match_store("store", BLOCKS) == 8
    assert index.match_store("other", BLOCKS) == 0


def test_a_store_that_a_worker_leaves_gives_it_no_credit():
    index = PrefixIndex()
    index.apply("a", BLOCKS[:8], ())
    for worker in ("a", "b"):
        index.share(worker, "store")
    index.share("b", "")
    assert index.match_all(BLOCKS) == {"a": 8}
    index.share("b", "store")
    index.snapshot("a", BLOCKS[:4])
    assert index.match_all(BLOCKS) == {"a": 4, "b": 2}
    index.drop("a")
    assert index.match_all(BLOCKS) == {}
