"""The prefill delayer: every status and outcome, its bounds, its counts and its feedback loop, by
id [S1] [S2] to [S8].
"""

from collections import Counter
from typing import Any

import pytest

from pdcluster_worker.engine.prefill_delayer import (
    PAUSE_SECONDS,
    REMEMBERED_BATCHES,
    DelayDecision,
    DelayWait,
    OwnBoard,
    PrefillDelayer,
    Pressure,
    RankState,
    negotiate,
)
from pdcluster_worker.messages.engine_settings import DelayerSettings
from tests.worker.engine.played_board import PlayedBoard

SETTINGS = DelayerSettings(max_delay_passes=4, max_delay_milliseconds=5000)
WATERMARK = DelayerSettings(max_delay_passes=4, token_usage_low_watermark=0.3)
QUEUE = DelayerSettings(max_delay_passes=4, queue_min_ratio=0.5)
CAN, CANNOT = RankState(prefillable=True), RankState(prefillable=False)
MAX_RUNNING = 16


def pressure(
    waiting: int = 1, running: int = 0, usage: float = 0.9, *, continuing: bool = False
) -> Pressure:
    return Pressure(waiting, running, MAX_RUNNING, continuing, usage)


ONE_PASS = DelayerSettings(max_delay_passes=1)
LATE, LOW = RankState(True, timed_out=True), RankState(True, below_watermark=True)
FIRST, SECOND, LAST = DelayWait(1, 0.0), DelayWait(2, 0.0), DelayWait(3, 0.0)
TOO_LONG = DelayWait(1, -5.0)


def full(running: int, max_prefill: int, **more: int) -> list[RankState]:
    return [RankState(True, running=running, max_prefill=max_prefill, **more)]


@pytest.mark.parametrize(
    ("settings", "wait", "ranks", "expected"),
    [
        # none: whatever the verdict is nothing comes of it [S3]
        (SETTINGS, None, [CANNOT], ("none", True, "")),
        (SETTINGS, LAST, [CANNOT, CANNOT], ("none", True, "")),
        # mixed [S3]
        (SETTINGS, None, [CAN, CANNOT], ("mixed", False, "delay")),
        (SETTINGS, SECOND, [CANNOT, CAN], ("mixed", False, "delay")),
        (SETTINGS, LAST, [CAN, CANNOT], ("mixed", True, "wait_timeout")),
        (SETTINGS, TOO_LONG, [CAN, CANNOT], ("mixed", True, "wait_timeout")),
        (SETTINGS, None, [CAN, CANNOT, LATE], ("mixed", True, "wait_timeout")),
        (ONE_PASS, None, [CAN, CANNOT], ("mixed", True, "wait_timeout")),
        # one rank below the watermark forces all [S5]
        (WATERMARK, FIRST, [CAN, CANNOT, LOW], ("mixed", True, "token_watermark")),
        (WATERMARK, None, [LOW, *full(16, 4)], ("all", True, "token_watermark")),
        # all [S4]
        (SETTINGS, None, [CAN, CAN], ("all", True, "no_wait")),
        (SETTINGS, SECOND, [CAN, CAN], ("all", True, "wait_success")),
        # all, slots: the fullest rank lacks seats for the largest batch
        (SETTINGS, None, [*full(13, 1), *full(0, 4)], ("all", False, "delay", True)),
        (SETTINGS, None, full(12, 4), ("all", True, "no_wait")),
        (SETTINGS, LAST, full(13, 4), ("all", True, "wait_timeout")),
        (SETTINGS, TOO_LONG, full(13, 4), ("all", True, "wait_timeout")),
        # all, queue: fewer wait than half of those that run, or than the largest batch
        (QUEUE, None, full(6, 9, waiting=2), ("all", False, "delay")),
        (QUEUE, None, full(6, 9, waiting=3), ("all", True, "no_wait")),
        (QUEUE, FIRST, full(6, 9, waiting=3), ("all", True, "wait_success")),
        (QUEUE, None, full(6, 2, waiting=2), ("all", True, "no_wait")),
        (QUEUE, None, full(1, 9), ("all", True, "no_wait")),  # half of 1 is none
        (QUEUE, None, full(0, 9, waiting=1), ("all", True, "no_wait")),
        (QUEUE, LAST, full(6, 9, waiting=1), ("all", True, "wait_timeout")),
        (QUEUE, None, [*full(6, 9, waiting=1), LATE], ("all", True, "wait_timeout")),
    ],
)
def test_verdict_of_every_status_s3_s4_s5(
    settings: DelayerSettings,
    wait: DelayWait | None,
    ranks: list[RankState],
    expected: tuple[Any, ...],
) -> None:
    assert negotiate(settings, wait, ranks, MAX_RUNNING, now=0.0) == DelayDecision(*expected)


def test_delay_ends_after_max_delay_passes_less_one_and_counts_again_s1_s3() -> None:
    delayer = PrefillDelayer(SETTINGS, PlayedBoard(CANNOT))
    allowed = []
    for _ in range(8):
        allowed.append(delayer.begin(pressure(), now=0.0))
        delayer.finish(int(allowed[-1]), is_idle=False, now=0.0)

    assert allowed == [False, False, False, True] * 2


def test_rank_says_its_state_each_pass_s2_s5() -> None:
    board = PlayedBoard()
    delayer = PrefillDelayer(WATERMARK, board)
    delayer.begin(pressure(waiting=3, running=2, usage=0.2), now=0.0)
    delayer.finish(3, is_idle=False, now=0.0)
    delayer.begin(pressure(waiting=0, running=5, usage=0.2), now=0.0)
    delayer.finish(0, is_idle=True, now=0.0)

    assert board.published == [
        RankState(True, below_watermark=True, running=2, max_prefill=0, waiting=3),
        # [S5]: only where it could prefill
        RankState(False, below_watermark=False, running=5, max_prefill=3, waiting=0),
        None,
    ]


def test_rank_without_a_seat_cannot_prefill_unless_a_prompt_goes_on_s6() -> None:
    assert not pressure(waiting=4, running=MAX_RUNNING).prefillable
    assert pressure(waiting=0, running=MAX_RUNNING, continuing=True).prefillable


def test_rank_that_timed_out_says_so_s2() -> None:
    board = PlayedBoard(CANNOT)
    delayer = PrefillDelayer(SETTINGS, board)
    delayer.begin(pressure(), now=0.0)
    delayer.begin(pressure(), now=5.0)

    assert [state.timed_out for state in board.published if state] == [False, True]


def test_largest_batch_is_of_a_window_s6() -> None:
    board = PlayedBoard()
    delayer = PrefillDelayer(SETTINGS, board)
    for admitted in (9, *[2] * REMEMBERED_BATCHES):
        delayer.begin(pressure(), now=0.0)
        delayer.finish(admitted, is_idle=False, now=0.0)
    delayer.begin(pressure(), now=0.0)

    assert [state.max_prefill for state in board.published if state][-2:] == [9, 2]


def test_first_delay_for_want_of_seats_is_skipped_s4() -> None:
    delayer = PrefillDelayer(SETTINGS, OwnBoard())
    delayer.begin(pressure(), now=0.0)
    delayer.finish(4, is_idle=False, now=0.0)

    assert [delayer.begin(pressure(running=14), now=0.0) for _ in range(3)] == [True, False, False]


def test_waits_are_those_before_the_pass_that_ends_them_s7() -> None:
    """And of allowed passes that computed prompts alone."""
    board = PlayedBoard(CANNOT)
    delayer = PrefillDelayer(SETTINGS, board)
    for now in (0.0, 1.0):
        delayer.begin(pressure(), now)
        delayer.finish(0, is_idle=False, now=now)
    board.said = [CAN]
    delayer.begin(pressure(), now=1.5)
    delayer.finish(2, is_idle=False, now=1.5)
    delayer.begin(pressure(), now=2.0)
    delayer.finish(0, is_idle=False, now=2.0)  # allowed, but no blocks were free
    delayer.begin(pressure(), now=2.0)
    delayer.finish(1, is_idle=False, now=2.0)
    delayer.begin(pressure(waiting=0), now=2.0)  # could not prefill, which the other can
    delayer.finish(0, is_idle=False, now=2.0)

    counts = delayer.take_counts()
    assert counts.waits == [(2, 1.5), (0, 0.0)]
    assert counts.outcomes == Counter(
        {
            ("mixed", False, "delay", False): 3,
            ("all", True, "wait_success", True): 1,
            ("all", True, "no_wait", False): 1,
            ("all", True, "no_wait", True): 1,
        }
    )
    assert not delayer.take_counts().outcomes


def test_delayed_engine_with_nothing_to_run_asks_again_after_a_pause_and_by_the_deadline() -> None:
    delayer = PrefillDelayer(SETTINGS, PlayedBoard(CANNOT))
    assert delayer.next_pass_seconds(0.0) is None

    delayer.begin(pressure(), now=0.0)
    assert delayer.next_pass_seconds(1.0) == PAUSE_SECONDS
    assert delayer.next_pass_seconds(4.99) == pytest.approx(0.01)
    assert delayer.next_pass_seconds(9.0) == 0.0


def loop_of_two_ranks(max_delay_passes: int, passes: int) -> list[int]:
    """Passes at which the first of two ranks lets a prompt in, while they are never ready together.

    Each can prefill in every other pass: chunks of a long prompt keep it busy in between, out of
    step with the other.
    """
    board = PlayedBoard()
    delayer = PrefillDelayer(
        DelayerSettings(max_delay_passes=max_delay_passes, max_delay_milliseconds=10**12), board
    )
    admitted = []
    for number in range(passes):
        mine = number % 2 == 0
        board.said = [CANNOT if mine else CAN]
        allow = delayer.begin(pressure(waiting=int(mine)), now=float(number))
        delayer.finish(int(allow and mine), is_idle=False, now=float(number))
        if allow and mine:
            admitted.append(number)
    return admitted


def test_ranks_out_of_step_hold_each_other_up_without_end_but_for_the_bound_s8() -> None:
    assert loop_of_two_ranks(max_delay_passes=10_000, passes=5_000) == []  # the feedback loop

    assert loop_of_two_ranks(max_delay_passes=5, passes=40) == [4, 14, 24, 34]  # each wait ends
