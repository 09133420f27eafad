"""The index of prompts in hand: what an engine holds, what is on its way, and whose turn counts."""

import pytest

from pdcluster_worker.routing.prefixes_in_hand import Coming, PrefixesInHand

A, B, C, D = b"a", b"ab", b"abc", b"abcd"


@pytest.fixture
def prefixes() -> PrefixesInHand:
    return PrefixesInHand()


def begin(
    prefixes: PrefixesInHand,
    request_id: str,
    *hashes: bytes,
    engine: str = "0",
    priority: int = 0,
    is_here: bool = False,
) -> None:
    prefixes.begin(request_id, engine, hashes, priority=priority, is_here=is_here)


def coming(
    prefixes: PrefixesInHand, *hashes: bytes, engine: str = "0", priority: int = 0
) -> Coming | None:
    return prefixes.coming(engine, hashes, priority=priority)


def here(prefixes: PrefixesInHand, *hashes: bytes, engine: str = "0", priority: int = 0) -> int:
    return prefixes.here(engine, hashes, priority=priority)


def test_longest_match_counts_whatever_the_order(prefixes: PrefixesInHand) -> None:
    begin(prefixes, "short", A, B, b"x", is_here=True)
    begin(prefixes, "long", A, B, C, is_here=True)
    begin(prefixes, "shorter", A, is_here=True)

    assert here(prefixes, A, B, C, D) == 3


def test_first_of_equals_is_the_one_that_is_coming(prefixes: PrefixesInHand) -> None:
    begin(prefixes, "one", A, B)
    begin(prefixes, "two", A, B)

    assert coming(prefixes, A, B, C) == Coming("one", 2)
    prefixes.ended("one")
    assert coming(prefixes, A, B, C) == Coming("two", 2)


def test_longer_one_is_coming_before_an_earlier_one(prefixes: PrefixesInHand) -> None:
    begin(prefixes, "short", A)
    begin(prefixes, "long", A, B)

    assert coming(prefixes, A, B, C) == Coming("long", 2)


def test_what_is_here_is_not_coming_nor_the_other_way_round(prefixes: PrefixesInHand) -> None:
    begin(prefixes, "here", A, B, is_here=True)
    begin(prefixes, "coming", A)

    assert here(prefixes, A, B) == 2
    assert coming(prefixes, A, B) == Coming("coming", 1)


def test_less_urgent_one_is_not_counted_on(prefixes: PrefixesInHand) -> None:
    begin(prefixes, "batch", A, B, priority=5)

    assert coming(prefixes, A, B, priority=0) is None
    assert coming(prefixes, A, B, priority=5) == Coming("batch", 2)
    prefixes.arrived("batch")
    assert here(prefixes, A, B, priority=0) == 0
    assert here(prefixes, A, B, priority=5) == 2


def test_prompt_of_more_than_twice_the_length_is_not_waited_for(prefixes: PrefixesInHand) -> None:
    begin(prefixes, "long", A, B, C, D, b"x")
    assert coming(prefixes, A, B) is None
    begin(prefixes, "twice", A, B, C, D)
    assert coming(prefixes, A, B) == Coming("twice", 2)


def test_long_prompt_that_is_here_counts_whatever_its_length(prefixes: PrefixesInHand) -> None:
    begin(prefixes, "long", A, B, C, D, b"x", is_here=True)
    assert here(prefixes, A) == 1


def test_each_engine_has_its_own(prefixes: PrefixesInHand) -> None:
    begin(prefixes, "other", A, engine="1", is_here=True)

    assert here(prefixes, A) == 0
    assert here(prefixes, A, engine="1") == 1


def test_prompts_that_begin_otherwise_or_are_short_match_nothing(prefixes: PrefixesInHand) -> None:
    begin(prefixes, "r", A, B)
    begin(prefixes, "short")

    assert coming(prefixes, b"z", B) is None
    assert coming(prefixes) is None
    assert len(prefixes) == 1


def test_nothing_is_left_of_ended_requests_and_unknown_ones_do_no_harm(
    prefixes: PrefixesInHand,
) -> None:
    begin(prefixes, "r", A, B)
    prefixes.arrived("r")
    for request_id in ("r", "r", "unknown"):
        prefixes.ended(request_id)
    prefixes.arrived("unknown")

    assert len(prefixes) == 0
    assert not prefixes._by_first_block
