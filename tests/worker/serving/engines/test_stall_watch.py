"""Stalls of an engine: sequences of looks, answers and steps, worked out by hand."""

from collections.abc import Sequence

import pytest

from pdcluster_worker.engine.core import EngineCore
from pdcluster_worker.messages.engine import Pong, Submit
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from pdcluster_worker.serving.engines.stall_watch import (
    LAST_CHANCE_SECONDS,
    Condition,
    LongestStep,
    StallWatch,
    period_seconds,
)
from tests.worker.fake_clock import FakeClock
from tests.worker.fake_network import FakeNetwork, FakeTransport
from tests.worker.fake_runner import FakeRunner
from tests.worker.serving.doubles import steps_of

MARGIN = 4.0
IDLE, BUSY = False, True


class Watched:
    """A watch, its clock, and what it said at each look."""

    def __init__(self, warm_up_seconds: float = 0.0) -> None:
        self.clock = FakeClock()
        self.watch = StallWatch(self.clock, warm_up_seconds)

    def looks(self, count: int) -> list[Condition]:
        return [self._poll() for _ in range(count)]

    def answered(self, pongs: Sequence[Pong]) -> list[Condition]:
        """One a second, each after an answer."""
        output = []
        for pong in pongs:
            self.watch.on_pong(pong)
            output.append(self._poll())
        return output

    def _poll(self) -> Condition:
        self.clock.advance(1.0)
        return self.watch.poll(MARGIN)


def test_watch_silent_engine_stalls_after_the_margin_and_is_lost_after_as_long_again():
    assert Watched().looks(9) == [*["well"] * 4, *["stalled"] * 4, "lost"]


def test_watch_last_chance_is_bounded_for_a_long_margin():
    clock = FakeClock()
    watch = StallWatch(clock, 0.0)
    output = []
    for _ in range(300):
        clock.advance(1.0)
        output.append(watch.poll(200.0))

    assert (output.index("stalled"), output.index("lost")) == (200, 200 + LAST_CHANCE_SECONDS)


def test_watch_leaves_a_step_to_an_engine_that_ends_itself_as_long_as_it_answers():
    clock = FakeClock()
    watch = StallWatch(clock, 0.0, own_stop_seconds=30.0)
    output = []
    for second in range(60):
        clock.advance(1.0)
        if second < 20:
            watch.on_pong(Pong(0, BUSY))
        output.append(watch.poll(MARGIN))

    # the step: stalled after the margin; the answers end at 20, and it is lost a margin later
    assert (output.index("stalled"), output.index("lost")) == (4, 24)

    watched = StallWatch(clock, 0.0, own_stop_seconds=30.0)
    output = []
    for _ in range(60):
        clock.advance(1.0)
        watched.on_pong(Pong(0, BUSY))
        output.append(watched.poll(MARGIN))
    assert (output.index("stalled"), output.index("lost")) == (4, 34)


def test_watch_margin_comes_on_top_of_the_longest_step():
    watched = Watched(warm_up_seconds=3.0)
    watched.looks(4)
    watched.watch.on_stats(steps_of(("prefill", 5.0), ("decode", 0.1), num_steps=2))
    watched.watch.on_stats(steps_of(("decode", 0.2), num_steps=3))

    assert watched.watch.longest_step_seconds == 5.0
    assert watched.looks(10) == [*["well"] * 9, "stalled"]


@pytest.mark.parametrize("hears_pong_first", [False, True])
def test_watch_step_of_a_frozen_container_counts_as_long_as_it_was_watched(hears_pong_first):
    """The engine's clock has run on for ten minutes, in which its server process was frozen too."""
    watched = Watched()
    watched.looks(1)
    watched.clock.advance(600.0)
    watched.looks(1)
    if hears_pong_first:
        watched.watch.on_pong(Pong(1, BUSY))
    watched.watch.on_stats(steps_of(("decode", 600.0), num_steps=1))

    # looks, those of the freeze, and what lies between two looks
    assert watched.watch.longest_step_seconds == 1 + 2 + 2
    assert watched.looks(10) == [*["well"] * 9, "stalled"]


def test_watch_stall_that_ended_leaves_the_limit_as_it_was():
    watched = Watched()
    assert watched.looks(7)[-1] == "stalled"
    watched.watch.on_pong(Pong(1, BUSY))
    watched.watch.on_stats(steps_of(("decode", 7.0), num_steps=1))

    assert watched.watch.longest_step_seconds == 0.0
    watched.watch.on_stats(steps_of(("decode", 0.5), num_steps=2))
    assert watched.watch.longest_step_seconds == 0.5  # what comes after it counts again


def test_watch_what_was_watched_before_the_last_statistics_lends_nothing_to_a_later_step():
    watched = Watched()
    watched.looks(3)
    watched.watch.on_stats(steps_of(("decode", 0.1), num_steps=1))
    watched.watch.on_stats(steps_of(("decode", 600.0), num_steps=2))

    assert watched.watch.longest_step_seconds == 2.0


def test_longest_step_is_forgotten_after_an_hour_but_that_of_the_warm_up_is_not():
    clock = FakeClock()
    longest = LongestStep(clock, 3.0)
    seen = []
    for seconds in (9.0, 2.0, 5.0, 4.0):  # one each ten minutes
        longest.add(seconds)
        seen.append(longest.seconds)
        clock.advance(600.0)
    for _ in range(5):
        seen.append(longest.seconds)
        clock.advance(600.0)

    assert seen == [9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 5.0, 5.0, 4.0]
    assert longest.seconds == 3.0


@pytest.mark.parametrize(
    "pongs",
    [[Pong(7, IDLE)] * 100, [Pong(steps, BUSY) for steps in range(100)]],
    ids=["idle", "makes steps"],
)
def test_watch_engine_that_answers_and_has_nothing_to_do_or_makes_steps_stays_well(pongs):
    assert set(Watched().answered(pongs)) == {"well"}


def test_watch_engine_that_answers_with_work_and_makes_no_step_stalls():
    watched = Watched()
    first = watched.answered([Pong(7, BUSY)] * 3)  # of which the first reports steps
    second = watched.answered([Pong(7, BUSY)] * 3)

    assert (first, second) == (["well"] * 3, ["well", "stalled", "stalled"])


def test_watch_statistics_count_as_steps():
    watched = Watched()
    for number in range(1, 20):
        assert watched.looks(3) == ["well"] * 3
        watched.watch.on_stats(steps_of(num_steps=number))


def test_watch_engine_that_makes_progress_again_is_well():
    watched = Watched()
    watched.looks(6)

    assert watched.answered([Pong(1, BUSY), Pong(2, BUSY)]) == ["well", "well"]
    assert watched.looks(4)[-1] == "stalled"  # and counts again


@pytest.mark.parametrize("asleep_seconds", [10.0, 3600.0])
def test_watch_time_without_a_watch_counts_as_two_looks(asleep_seconds):
    """A laptop's lid, or a server process that was stopped with its engine."""
    watched = Watched()
    watched.clock.advance(asleep_seconds)

    assert watched.looks(3) == ["well", "well", "well"]
    assert watched.watch.still_seconds == 4.0


def test_watch_has_one_ping_under_way():
    watch = StallWatch(FakeClock(), 0.0)

    assert [watch.needs_ping() for _ in range(3)] == [True, False, False]
    watch.on_pong(Pong(0, IDLE))
    assert [watch.needs_ping() for _ in range(2)] == [True, False]


@pytest.mark.parametrize(("margin", "period"), [(20.0, 1.0), (4.0, 1.0), (2.0, 0.5), (1.0, 0.25)])
def test_period_is_short_against_the_margin(margin, period):
    assert period_seconds(margin) == period


def test_watch_slow_steps_of_a_working_engine_are_no_stall():
    """Each step takes longer than the margin, as those of the warm-up did; pings are answered
    between steps alone.
    """
    step_seconds, clock, output = 11, FakeClock(), []
    watch = StallWatch(clock, warm_up_seconds=float(step_seconds))
    runner = FakeRunner(num_blocks=16, block_size=4)
    transport = FakeTransport(FakeNetwork(), runner, "e", clock)
    core = EngineCore(EngineSettings(4, 16, 8, 4, 64, True, 30.0), runner, transport, clock)

    def pass_time() -> None:
        for _ in range(step_seconds):
            clock.advance(1.0)
            output.append(watch.poll(MARGIN))

    runner.on_execute = pass_time
    core.handle(Submit(RequestSpec("r", list(range(20)), SamplingParams(max_tokens=4, seed=0))))
    while core.has_work:
        watch.on_pong(Pong(core.num_steps, core.has_work))
        core.step()

    assert core.num_steps == 6  # 20 prompt tokens by 8, then three tokens more
    assert set(output) == {"well"}
    assert len(output) == 6 * step_seconds
