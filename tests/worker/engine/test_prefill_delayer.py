"""The prefill delayer: every status and outcome, its bounds, its counts and its feedback loop, by
id [S1] [S2] to [S8].
"""

from collections import Counter

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


@pytest.mark.parametrize(
    ("settings", "wait", "ranks", "expected"),
    [
        # none: whatever the verdict is nothing comes of it [S3]
        (SETTINGS, None, [CANNOT], DelayDecision("none", True, "")),
        (SETTINGS, DelayWait(3, 0.0), [CANNOT, CANNOT], DelayDecision("none", True, "")),
        # mixed [S3]
        (SETTINGS, None, [CAN, CANNOT], DelayDecision("mixed", False, "delay")),
        (SETTINGS, DelayWait(1, 0.0), [CANNOT, CAN], DelayDecision("mixed", False, "delay")),
        (SETTINGS, DelayWait(2, 0.0), [CAN, CANNOT], DelayDecision("mixed", False, "delay")),
        (SETTINGS, DelayWait(3, 0.0), [CAN, CANNOT], DelayDecision("mixed", True, "wait_timeout")),
        # max_delay_seconds
        (SETTINGS, DelayWait(1, -5.0), [CAN, CANNOT], DelayDecision("mixed", True, "wait_timeout")),
        (
            SETTINGS,
            None,
            [CAN, CANNOT, RankState(True, timed_out=True)],
            DelayDecision("mixed", True, "wait_timeout"),
        ),
        (
            DelayerSettings(max_delay_passes=1),
            None,
            [CAN, CANNOT],
            DelayDecision("mixed", True, "wait_timeout"),
        ),
        # one rank below the watermark forces all [S5]
        (
            WATERMARK,
            DelayWait(1, 0.0),
            [CAN, CANNOT, RankState(True, below_watermark=True)],
            DelayDecision("mixed", True, "token_watermark"),
        ),
        (
            WATERMARK,
            None,
            [RankState(True, below_watermark=True, running=16, max_prefill=4)],
            DelayDecision("all", True, "token_watermark"),
        ),
        # all [S4]
        (SETTINGS, None, [CAN, CAN], DelayDecision("all", True, "no_wait")),
        (SETTINGS, DelayWait(2, 0.0), [CAN, CAN], DelayDecision("all", True, "wait_success")),
        # all, slots: the fullest rank lacks seats for the largest batch
        (
            SETTINGS,
            None,
            [RankState(True, running=13, max_prefill=1), RankState(True, max_prefill=4)],
            DelayDecision("all", False, "delay", True),
        ),
        (
            SETTINGS,
            None,
            [RankState(True, running=12, max_prefill=4)],
            DelayDecision("all", True, "no_wait"),
        ),
        (
            SETTINGS,
            DelayWait(3, 0.0),
            [RankState(True, running=13, max_prefill=4)],
            DelayDecision("all", True, "wait_timeout"),
        ),
        (
            SETTINGS,
            DelayWait(1, -5.0),
            [RankState(True, running=13, max_prefill=4)],
            DelayDecision("all", True, "wait_timeout"),
        ),
        # all, queue: fewer wait than half of those that run, or than the largest batch
        (
            QUEUE,
            None,
            [RankState(True, running=6, max_prefill=9, waiting=2)],
            DelayDecision("all", False, "delay"),
        ),
        (
            QUEUE,
            None,
            [RankState(True, running=6, max_prefill=9, waiting=3)],
            DelayDecision("all", True, "no_wait"),
        ),
        (
            QUEUE,
            DelayWait(1, 0.0),
            [RankState(True, running=6, max_prefill=9, waiting=3)],
            DelayDecision("all", True, "wait_success"),
        ),
        (
            QUEUE,
            None,
            [RankState(True, running=6, max_prefill=2, waiting=2)],
            DelayDecision("all", True, "no_wait"),
        ),
        # half of 1 is none
        (
            QUEUE,
            None,
            [RankState(True, running=1, max_prefill=9, waiting=0)],
            DelayDecision("all", True, "no_wait"),
        ),
        # nothing to delay for
        (
            QUEUE,
            None,
            [RankState(True, running=0, max_prefill=9, waiting=1)],
            DelayDecision("all", True, "no_wait"),
        ),
        (
            QUEUE,
            DelayWait(3, 0.0),
            [RankState(True, running=6, max_prefill=9, waiting=1)],
            DelayDecision("all", True, "wait_timeout"),
        ),
        (
            QUEUE,
            None,
            [RankState(True, running=6, max_prefill=9, waiting=1, timed_out=True)],
            DelayDecision("all", True, "wait_timeout"),
        ),
    ],
)
def test_verdict_of_every_status_s3_s4_s5(
    settings: DelayerSettings,
    wait: DelayWait | None,
    ranks: list[RankState],
    expected: DelayDecision,
) -> None:
    assert negotiate(settings, wait, ranks, MAX_RUNNING, now=0.0) == expected


def test_delay_ends_after_max_delay_passes_less_one_and_counts_again_s1_s3() -> None:
    delayer = PrefillDelayer(SETTINGS, PlayedBoard(CANNOT))
    allowed = []
    for _ in range(8):
        allowed.append(delayer.begin(pressure(), now=0.0))
        delayer.finish(int(allowed[-1]), is_idle=False, now=0.0)

    assert allowed == [False, False, False, True] * 2


def test_delay_ends_after_max_delay_seconds_s1() -> None:
    delayer = PrefillDelayer(
        DelayerSettings(max_delay_passes=1000, max_delay_milliseconds=5000), PlayedBoard(CANNOT)
    )

    assert [delayer.begin(pressure(), now) for now in (0.0, 2.0, 4.9, 5.0)] == [
        False,
        False,
        False,
        True,
    ]


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
        DelayerSettings(max_delay_passes=max_delay_passes, max_delay_milliseconds=10**12),
        board,
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
