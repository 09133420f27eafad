"""The prefix index: leading matches only, and the same sets as a naive model [Y11]."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.routing.prefix_index import PrefixIndex

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


def test_match_counts_leading_blocks_only() -> None:
    index = PrefixIndex()
    index.snapshot("p0", [b"a", b"b", b"d"])

    assert index.match("p0", [b"a", b"b", b"c", b"d"]) == 2
    assert index.match("p0", [b"a", b"b"]) == 2
    assert index.match("p0", [b"c", b"a"]) == 0
    assert index.match("p0", []) == 0


def test_match_of_unknown_worker_is_zero() -> None:
    assert PrefixIndex().match("p0", [b"a"]) == 0


def test_apply_duplicates_are_no_ops() -> None:
    index = PrefixIndex()
    index.snapshot("p0", [b"a"])
    index.apply("p0", stored=[b"b", b"b"], removed=[])
    index.apply("p0", stored=[b"b"], removed=[b"z", b"z"])
    index.apply("p0", stored=[], removed=[b"b"])

    assert index.match("p0", [b"a", b"b"]) == 1


def test_apply_hash_stored_and_removed_at_once_is_gone() -> None:
    index = PrefixIndex()
    index.snapshot("p0", [])
    index.apply("p0", stored=[b"a"], removed=[b"a"])

    assert index.match("p0", [b"a"]) == 0


def test_snapshot_replaces_what_was_known() -> None:
    index = PrefixIndex()
    index.snapshot("p0", [b"a", b"b"])
    index.snapshot("p0", [b"b"])

    assert index.match("p0", [b"a", b"b"]) == 0
    assert index.match("p0", [b"b"]) == 1


def test_apply_without_snapshot_starts_from_nothing() -> None:
    index = PrefixIndex()
    index.apply("p0", stored=[b"a"], removed=[b"b"])

    assert index.match("p0", [b"a", b"b"]) == 1


def test_hashes_are_a_snapshot_of_now() -> None:
    index = PrefixIndex()
    index.apply("p0", stored=[b"a", b"b"], removed=[])
    before = index.hashes("p0")
    index.apply("p0", stored=[], removed=[b"a"])

    assert before == {b"a", b"b"}
    assert index.hashes("p0") == {b"b"}
    assert index.hashes("never") == frozenset()


def test_drop_forgets_all_blocks_of_that_worker() -> None:
    index = PrefixIndex()
    index.snapshot("p0", [b"a"])
    index.snapshot("p1", [b"a"])
    index.drop("p0")
    index.drop("never")

    assert index.match("p0", [b"a"]) == 0
    assert index.match("p1", [b"a"]) == 1


def test_match_all_answers_for_every_worker_at_once() -> None:
    index = PrefixIndex()
    index.snapshot("p0", [b"a", b"b", b"c"])
    index.snapshot("p1", [b"a", b"b"])
    index.snapshot("p2", [b"b", b"c"])
    index.snapshot("p3", [])

    assert index.match_all([b"a", b"b", b"c"]) == {"p0": 3, "p1": 2}
    assert index.match_all([b"a", b"x"]) == {"p0": 1, "p1": 1}
    assert index.match_all([b"x"]) == index.match_all([]) == {}


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


def test_match_all_of_an_empty_index_is_nothing() -> None:
    assert PrefixIndex().match_all([b"a"]) == {}


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
