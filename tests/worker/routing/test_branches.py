"""Choices of a prompt over decode workers: evened out, within their blocks, where it pays."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.routing import branches
from pdcluster_worker.routing.branches import (
    MIN_ANSWER_TOKENS,
    TOKENS_A_STEP,
    BranchSize,
    BranchWorker,
    place_branches,
)

BUSY = 8
SIZE = BranchSize(num_branches=7, answer_tokens=200, block_size=16)
HOME = BranchWorker("home", 1, 10_000)
OTHERS = [BranchWorker(key, 0, 10_000, lacking_tokens=2000) for key in "ab"]


@pytest.mark.parametrize(
    ("home", "others", "size", "reason", "counts"),
    [
        (HOME, OTHERS, SIZE, "spread", {"a": 3, "b": 2}),
        (HOME, [], SIZE, "alone", {}),
        (HOME, OTHERS, replace(SIZE, answer_tokens=MIN_ANSWER_TOKENS - 1), "short_answer", {}),
        (HOME, OTHERS, replace(SIZE, num_branches=6), "idle", {}),
        # each would get fewer tokens of answers than its prompt is worth
        (HOME, [replace(each, lacking_tokens=99_999) for each in OTHERS], SIZE, "not_worth_it", {}),
        # one of them has the prompt already
        (
            HOME,
            [replace(OTHERS[0], lacking_tokens=99_999), replace(OTHERS[1], lacking_tokens=0)],
            SIZE,
            "spread",
            {"b": 4},
        ),
        # others are busier
        (HOME, [replace(each, num_requests=20) for each in OTHERS], SIZE, "not_worth_it", {}),
        # home is busy: all leave it
        (replace(HOME, num_requests=20), OTHERS, SIZE, "spread", {"a": 4, "b": 3}),
        # no worker has blocks to spare
        (HOME, [replace(each, free_blocks=0) for each in OTHERS], SIZE, "not_worth_it", {}),
    ],
)
def test_choices_are_placed_where_it_pays(home, others, size, reason, counts):
    placement = place_branches(home, others, size, BUSY)

    assert (placement.reason, placement.counts) == (reason, counts)


def test_idle_home_without_blocks_keeps_what_it_has_blocks_for():
    size = replace(SIZE, num_branches=3)
    home = replace(HOME, free_blocks=2 * size.answer_blocks)

    assert place_branches(HOME, OTHERS, size, BUSY).reason == "idle"
    assert sum(place_branches(home, OTHERS[:1], size, BUSY).counts.values()) == 2
    assert place_branches(replace(home, free_blocks=0), OTHERS, size, BUSY).counts == {
        "a": 2,
        "b": 1,
    }


@pytest.mark.parametrize("num_branches", [7, 127])
def test_choices_are_placed_over_many_workers_in_few_tries(monkeypatch, num_branches):
    tries = []
    even_out = branches._evened_out
    monkeypatch.setattr(branches, "_evened_out", lambda *args: tries.append(1) or even_out(*args))
    size = replace(SIZE, num_branches=num_branches, answer_tokens=MIN_ANSWER_TOKENS)
    lacking = num_branches * TOKENS_A_STEP * MIN_ANSWER_TOKENS  # pays where one has nearly all
    others = [BranchWorker(str(number), 0, 100_000, lacking - 1) for number in range(300)]
    placement = place_branches(HOME, others, size, busy_requests=2)

    assert (placement.reason, placement.counts) == ("not_worth_it", {})
    assert 0 < len(tries) < 20


workers = st.builds(
    BranchWorker,
    key=st.just(""),
    num_requests=st.integers(0, 40),
    free_blocks=st.integers(0, 3000),
    lacking_tokens=st.integers(0, 40_000),
)
sizes = st.builds(
    BranchSize,
    num_branches=st.integers(1, 40),
    answer_tokens=st.integers(1, 2000),
    block_size=st.sampled_from([1, 16, 64]),
)


@given(workers, st.lists(workers, max_size=6), sizes, st.integers(0, 20))
def test_placement_keeps_within_blocks_and_pays_and_leaves_no_worker_busier_than_home(
    home, others, size, busy_requests
):
    home = replace(home, key="home", lacking_tokens=0)
    others = [replace(each, key=str(number)) for number, each in enumerate(others)]
    placement = place_branches(home, others, size, busy_requests)
    counts = placement.counts

    at_home = size.num_branches - sum(counts.values())
    assert (at_home >= 0, bool(counts)) == (True, placement.reason == "spread")
    home_has_room = at_home < home.free_blocks // size.answer_blocks
    for each in others:
        if (count := counts.get(each.key, 0)) == 0:
            continue
        assert count <= size.capacity(each)
        assert each.lacking_tokens <= TOKENS_A_STEP * count * size.answer_tokens
        if home_has_room:  # the last one that it took would have made home as busy
            assert each.num_requests + count <= home.num_requests + at_home + 1
