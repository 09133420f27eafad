"""The memory in which engines of one worker read what the others said."""

import os
from collections.abc import Iterator

import pytest

from pdcluster_worker.engine.prefill_delayer import RankState
from pdcluster_worker.processes.dp_board import STALE_SECONDS, DpBoard, create_board
from tests.worker.fake_clock import FakeClock

FULL = RankState(True, True, 65535, 513, 1, True)


@pytest.fixture
def clock() -> FakeClock:
    clock = FakeClock()
    clock.advance(100.0)
    return clock


@pytest.fixture
def boards(clock: FakeClock) -> Iterator[list[DpBoard]]:
    descriptor = create_board(3)
    yield [DpBoard(descriptor, rank, clock) for rank in range(3)]
    os.close(descriptor)


@pytest.mark.parametrize(
    "state",
    [
        FULL,
        RankState(False),
        RankState(True, running=3),
        RankState(False, timed_out=True, waiting=70),
    ],
)
def test_board_shows_others_what_a_rank_says(boards, state):
    boards[0].publish(state)

    assert [board.others() for board in boards] == [[], [state], [state]]


def test_board_holds_counts_up_to_16_bits(boards):
    boards[0].publish(RankState(True, running=70_000))

    assert boards[1].others() == [RankState(True, running=65_535)]


def test_board_passes_over_what_is_old_or_withdrawn(boards, clock):
    boards[0].publish(FULL)
    clock.advance(STALE_SECONDS)
    boards[1].publish(RankState(False))
    assert boards[2].others() == [FULL, RankState(False)]

    clock.advance(0.001)
    assert boards[2].others() == [RankState(False)]
    boards[1].withdraw()
    assert boards[2].others() == []
