"""The index of prompts in hand: what an engine holds, what is on its way, and whose turn counts."""

import pytest

from pdcluster_worker.routing.inflight_prefix_index import InflightPrefix, InflightPrefixIndex

A, B, C, D = b"a", b"ab", b"abc", b"abcd"


@pytest.fixture
def prefixes() -> InflightPrefixIndex:
    return InflightPrefixIndex()


def begin(
    prefixes: InflightPrefixIndex,
    request_id: str,
    *hashes: bytes,
    engine: str = "0",
    priority: int = 0,
    is_local: bool = False,
) -> None:
    prefixes.begin(request_id, engine, hashes, priority=priority, is_local=is_local)


def coming(
    prefixes: InflightPrefixIndex, *hashes: bytes, engine: str = "0", priority: int = 0
) -> InflightPrefix | None:
    return prefixes.coming(engine, hashes, priority=priority)


def local(
    prefixes: InflightPrefixIndex, *hashes: bytes, engine: str = "0", priority: int = 0
) -> int:
    return prefixes.local(engine, hashes, priority=priority)


def test_longest_match_counts_whatever_the_order(prefixes: InflightPrefixIndex) -> None:
    begin(prefixes, "short", A, B, b"x", is_local=True)
    begin(prefixes, "long", A, B, C, is_local=True)
    begin(prefixes, "shorter", A, is_local=True)
    begin(prefixes, "other engine", A, B, C, D, engine="1", is_local=True)

    assert (local(prefixes, A, B, C, D), local(prefixes, A, B, C, D, engine="1")) == (3, 4)


def test_longest_one_is_coming_and_the_first_of_equals(prefixes: InflightPrefixIndex) -> None:
    begin(prefixes, "short", A)
    begin(prefixes, "one", A, B)
    begin(prefixes, "two", A, B)

    assert coming(prefixes, A, B, C) == InflightPrefix("one", 2)
    prefixes.ended("one")
    assert coming(prefixes, A, B, C) == InflightPrefix("two", 2)


def test_what_is_here_is_not_coming_nor_the_other_way_round(prefixes: InflightPrefixIndex) -> None:
    begin(prefixes, "here", A, B, is_local=True)
    begin(prefixes, "coming", A)

    assert local(prefixes, A, B) == 2
    assert coming(prefixes, A, B) == InflightPrefix("coming", 1)


def test_less_urgent_one_is_not_counted_on(prefixes: InflightPrefixIndex) -> None:
    begin(prefixes, "batch", A, B, priority=5)

    assert coming(prefixes, A, B, priority=0) is None
    assert coming(prefixes, A, B, priority=5) == InflightPrefix("batch", 2)
    prefixes.arrived("batch")
    assert local(prefixes, A, B, priority=0) == 0
    assert local(prefixes, A, B, priority=5) == 2


def test_prompt_of_more_than_twice_the_length_counts_once_it_is_here(
    prefixes: InflightPrefixIndex,
) -> None:
    begin(prefixes, "long", A, B, C, D, b"x")
    assert coming(prefixes, A, B) is None
    begin(prefixes, "twice", A, B, C, D)
    assert coming(prefixes, A, B) == InflightPrefix("twice", 2)
    prefixes.arrived("long")
    assert local(prefixes, A) == 1


def test_prompts_that_begin_otherwise_or_are_short_match_nothing(
    prefixes: InflightPrefixIndex,
) -> None:
    begin(prefixes, "r", A, B)
    begin(prefixes, "short")

    assert coming(prefixes, b"z", B) is None
    assert coming(prefixes) is None
    assert len(prefixes) == 1


def test_nothing_is_left_of_ended_requests_and_unknown_ones_do_no_harm(
    prefixes: InflightPrefixIndex,
) -> None:
    begin(prefixes, "r", A, B)
    prefixes.arrived("r")
    for request_id in ("r", "r", "unknown"):
        prefixes.ended(request_id)
    prefixes.arrived("unknown")

    assert len(prefixes) == 0
    assert not prefixes._by_first_block
