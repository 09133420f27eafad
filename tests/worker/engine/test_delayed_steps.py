"""The prefill delayer in the engine's loop: what waits, what goes on, and that a delayed engine
sleeps [S6].
"""

import pytest

from pdcluster_worker.engine.prefill_delayer import PAUSE_SECONDS, PrefillDelayer, RankState
from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.engine_settings import DelayerSettings
from tests.worker.engine.played_board import PlayedBoard

PROMPT = tuple(range(1, 10))


@pytest.fixture
def board():
    """Another engine that cannot prefill: every prompt here waits."""
    return PlayedBoard(RankState(prefillable=False))


@pytest.fixture
def rig(engine, board):
    return engine(
        delayer=PrefillDelayer(DelayerSettings(max_delay_passes=4), board), max_batched_tokens=5
    )


def test_delayed_engine_with_nothing_to_run_sleeps_until_its_next_pass(rig, spec):
    rig.handle(m.Submit(spec("a", PROMPT)))
    for _ in range(2):
        assert not rig.core.has_work  # the loop waits, and does not spin
        assert rig.core.next_wake_seconds() == PAUSE_SECONDS
        rig.step()
    assert not rig.token_ids("a")

    rig.step()  # the fourth pass: no longer
    assert rig.core.has_work
    rig.run()
    assert rig.token_ids("a") == rig.runner.reference(PROMPT, 3)


def test_delay_of_an_engine_with_nothing_to_run_ends_by_time_too(engine, spec, board):
    settings = DelayerSettings(max_delay_passes=10_000, max_delay_milliseconds=5000)
    rig = engine(delayer=PrefillDelayer(settings, board))
    rig.handle(m.Submit(spec("a")))
    rig.clock.advance(4.995)
    assert rig.core.next_wake_seconds() == pytest.approx(0.005)
    rig.clock.advance(0.005)
    rig.step()

    assert rig.tokens("a")[0].queue_seconds == 5.0


def test_decodes_go_on_while_a_prompt_is_held_back(rig, spec, board):
    board.said = []
    rig.handle(m.Submit(spec("a", PROMPT[:5], max_tokens=9)))
    board.said = [RankState(prefillable=False)]
    rig.handle(m.Submit(spec("b", PROMPT[:4], max_tokens=1)))
    assert (len(rig.token_ids("a")), rig.token_ids("b")) == (2, [])
    for _ in range(3):
        rig.step()

    assert len(rig.token_ids("a")) == 5
    assert len(rig.token_ids("b")) == 1


def test_prompt_that_has_begun_is_never_held_back_s6(rig, spec, board):
    board.said = []
    rig.handle(m.Submit(spec("a", PROMPT, max_tokens=1)))  # the first of two chunks
    board.said = [RankState(prefillable=False)]
    rig.step()

    assert len(rig.token_ids("a")) == 1


def test_prompt_held_back_goes_with_those_that_came_meanwhile(rig, spec, board):
    rig.handle(m.Submit(spec("a", (1, 2), max_tokens=1)))
    board.said = [RankState(prefillable=True)]
    rig.handle(m.Submit(spec("b", (3, 4), max_tokens=1)))

    assert [len(output.tokens) for output in rig.of(m.Tokens)] == [2]


def test_abort_of_a_prompt_held_back_leaves_nothing(rig, spec, board):
    rig.handle(m.Submit(spec("a", PROMPT)))
    rig.handle(m.Abort("a"))

    assert (rig.core.has_work, rig.core.next_wake_seconds()) == (False, None)
    assert board.published[-1] is None


def test_statistics_say_what_the_delayer_did_s7(rig, spec):
    rig.handle(m.Submit(spec("a", (1, 2), max_tokens=1)))
    for _ in range(3):
        rig.step()

    reports = rig.of(m.EngineStats)
    assert [wait for report in reports for wait in report.delay_waits] == [(3, 0.0)]
    outcomes = [outcome for report in reports for outcome in report.delay_outcomes]
    assert ("mixed", True, "wait_timeout", True, 1) in outcomes
    assert sum(count for *_, reason, _, count in outcomes if reason == "delay") == 3
