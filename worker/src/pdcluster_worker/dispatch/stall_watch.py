"""Decides when an engine stands still: it has work and makes no step, or answers no ping, for too long.

Too long is its longest step so far and a margin: a step cannot be interrupted
for a ping, and a slow machine has long steps.  Time counts only while it is
watched: a machine that slept, or a server process that was stopped, adds the
time of two looks.  Pure: the clock is passed in.  What follows is `dispatch.pulse`'s business.
"""

from collections.abc import Callable
from typing import Literal

from pdcluster_worker.engine.messages import EngineStats, Pong

Condition = Literal["well", "stalled", "lost"]
"""stalled: out of every choice, may still come back; lost: to be killed."""

LAST_CHANCE_SECONDS = 20.0
"""From stalled to lost at most: long enough for one scrape of every 15 s to see it."""

_LOOKS_PER_MARGIN = 4
_LONGEST_PERIOD_SECONDS = 1.0
_COUNTED_PERIODS = 2.0


def period_seconds(stall_seconds: float) -> float:
    """Seconds between two looks, and so between two pings: one, less for a short margin."""
    return min(_LONGEST_PERIOD_SECONDS, stall_seconds / _LOOKS_PER_MARGIN)


class Stillness:
    """Seconds without progress that were watched: between two looks two periods count at most."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._looked = clock()

    def look(self, period: float) -> float:
        """Count the time since the last look; returns the sum."""
        now = self._clock()
        self.seconds += min(now - self._looked, _COUNTED_PERIODS * period)
        self._looked = now
        return self.seconds

    def moved(self) -> None:
        """There was progress: count from now."""
        self.seconds = 0.0
        self._looked = self._clock()


class StallWatch:
    """One engine, from its being ready.

    longest_step_seconds: of its steps so far, at first that of its warm-up.
    """

    def __init__(self, clock: Callable[[], float], longest_step_seconds: float) -> None:
        self.longest_step_seconds = longest_step_seconds
        self._still = Stillness(clock)
        self._num_steps = 0
        self._is_asked = False

    @property
    def still_seconds(self) -> float:
        """How long it has stood still, as of the last look."""
        return self._still.seconds

    def asks(self) -> bool:
        """Whether to send a ping now: one is under way at a time."""
        asks, self._is_asked = not self._is_asked, True
        return asks

    def on_pong(self, pong: Pong) -> None:
        """Hear an answer.

        An engine without work is well, and one with work if it has made a step since the last answer.
        """
        self._is_asked = False
        if not pong.has_work:
            self._still.moved()
        self._on_steps(pong.num_steps)

    def on_stats(self, stats: EngineStats) -> None:
        """Learn how long its steps take."""
        for _, seconds in stats.steps:
            self.longest_step_seconds = max(self.longest_step_seconds, seconds)
        self._on_steps(stats.num_steps)

    def look(self, stall_seconds: float) -> Condition:
        """Its condition now, with that margin; to be called every `period_seconds`."""
        still = self._still.look(period_seconds(stall_seconds))
        limit = self.longest_step_seconds + stall_seconds
        if still > limit + min(stall_seconds, LAST_CHANCE_SECONDS):
            return "lost"
        return "stalled" if still > limit else "well"

    def _on_steps(self, num_steps: int) -> None:
        if num_steps > self._num_steps:
            self._num_steps = num_steps
            self._still.moved()
