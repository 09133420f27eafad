"""Decide when an engine here or at a peer has stalled: work without steps, or no answers."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

from pdcluster_worker.errors import PeerError
from pdcluster_worker.messages.engine import EngineStats, Pong
from pdcluster_worker.messages.peers import WorkerLoad

Condition = Literal["well", "stalled", "lost"]
"""stalled: out of every choice, may still come back; lost: to be killed."""

LAST_CHANCE_SECONDS = 20.0
"""Longest time from stalled to lost: long enough for one scrape of every 15 s to see it."""

REMEMBERED_SECONDS = 3600.0
"""A step longer than those of the warm-up is forgotten after that long."""

MARGINS = 1.5
"""Margins of a peer that we wait: its own report, which comes after one, has the reason."""

_CHECKS_PER_MARGIN = 4
_LONGEST_PERIOD_SECONDS = 1.0
_COUNTED_PERIODS = 2.0


def period_seconds(stall_seconds: float) -> float:
    """Seconds between two looks, and so between two pings: one, less for a short margin."""
    return min(_LONGEST_PERIOD_SECONDS, stall_seconds / _CHECKS_PER_MARGIN)


class StallTimer:
    """Seconds without progress that were watched: between two looks two periods count at most."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._polled = clock()

    def poll(self, period: float) -> float:
        now = self._clock()
        self.seconds += min(now - self._polled, _COUNTED_PERIODS * period)
        self._polled = now
        return self.seconds

    def moved(self) -> None:
        self.seconds = 0.0
        self._polled = self._clock()


class LongestStep:
    """The longest of the steps of the last REMEMBERED_SECONDS and of the warm-up."""

    def __init__(self, clock: Callable[[], float], warm_up_seconds: float) -> None:
        self._clock = clock
        self._warm_up_seconds = warm_up_seconds
        # (when, seconds): each shorter than the one before, all longer than the warm-up's.
        self._steps: deque[tuple[float, float]] = deque()

    @property
    def seconds(self) -> float:
        forgotten = self._clock() - REMEMBERED_SECONDS
        while self._steps and self._steps[0][0] <= forgotten:
            self._steps.popleft()
        return self._steps[0][1] if self._steps else self._warm_up_seconds

    def add(self, seconds: float) -> None:
        if seconds <= self._warm_up_seconds:
            return
        while self._steps and self._steps[-1][1] <= seconds:
            self._steps.pop()
        self._steps.append((self._clock(), seconds))


class StallWatch:
    """One engine, from its being ready.

    warm_up_seconds:  the longest step of its warm-up.
    own_stop_seconds: after so long in one step it ends by itself: while it answers it is not lost.
    """

    def __init__(
        self, clock: Callable[[], float], warm_up_seconds: float, own_stop_seconds: float = 0.0
    ) -> None:
        self._own_stop_seconds = own_stop_seconds
        self._silent = StallTimer(clock)
        self._longest = LongestStep(clock, warm_up_seconds)
        self._still = StallTimer(clock)
        self._most_still_seconds = 0.0  # since the last statistics
        self._has_stalled = False  # since the last statistics
        self._period = _LONGEST_PERIOD_SECONDS
        self._num_steps = 0
        self._is_pinged = False

    @property
    def longest_step_seconds(self) -> float:
        return self._longest.seconds

    @property
    def still_seconds(self) -> float:
        return self._still.seconds

    def needs_ping(self) -> bool:
        """Return whether to send a ping now: at most one is in flight."""
        needs_ping, self._is_pinged = not self._is_pinged, True
        return needs_ping

    def on_pong(self, pong: Pong) -> None:
        """An engine is well if it is idle, or has made a step since the last answer."""
        self._is_pinged = False
        self._silent.moved()
        if not pong.has_work:
            self._still.moved()
        self._on_steps(pong.num_steps)

    def on_stats(self, stats: EngineStats) -> None:
        """Learn how long steps take; none counts for more than was watched."""
        most = self._most_still_seconds + _COUNTED_PERIODS * self._period
        for _, seconds in stats.steps:
            if not self._has_stalled:
                self._longest.add(min(seconds, most))
        if stats.steps:
            self._most_still_seconds, self._has_stalled = 0.0, False
        self._on_steps(stats.num_steps)

    def poll(self, stall_seconds: float) -> Condition:
        """Its condition now; to be called every `period_seconds`."""
        self._period = period_seconds(stall_seconds)
        still, silent = self._still.poll(self._period), self._silent.poll(self._period)
        self._most_still_seconds = max(self._most_still_seconds, still)
        limit = self.longest_step_seconds + stall_seconds
        if still <= limit:
            return "well"
        self._has_stalled = True
        chance = min(stall_seconds, LAST_CHANCE_SECONDS)
        if silent <= chance:  # it computes, or compiles, for all that it says
            chance = max(chance, self._own_stop_seconds)
        return "lost" if still > limit + chance else "stalled"

    def _on_steps(self, num_steps: int) -> None:
        if num_steps > self._num_steps:
            self._num_steps = num_steps
            self._still.moved()


class NoProgressError(PeerError):
    """A prefill worker has made no progress for too long."""


class PrefillWatchdog:
    """With one prefill worker, from now.  load: its last report."""

    def __init__(self, clock: Callable[[], float], load: Callable[[], WorkerLoad]) -> None:
        self._still = StallTimer(clock)
        self._load = load
        self._progress = load().progress

    def check(self, stall_seconds: float) -> None:
        """Raise NoProgressError after its longest step and MARGINS without progress."""
        load = self._load()
        if load.progress != self._progress:
            self._progress = load.progress
            self._still.moved()
        still = self._still.poll(period_seconds(stall_seconds))
        if still > load.longest_step_seconds + MARGINS * stall_seconds:
            limit = f"qos.stallSeconds is {stall_seconds:g}"
            raise NoProgressError(f"its engine has made no progress for {still:.1f} s ({limit})")


@asynccontextmanager
async def watch(check: Callable[[], None], period: Callable[[], float]) -> AsyncIterator[None]:
    """Call `check` every so many seconds while the block runs, which must not yield."""
    loop = asyncio.get_running_loop()
    error: Exception | None = None
    timer: asyncio.TimerHandle | None = None

    def poll() -> None:
        nonlocal error, timer
        try:
            check()
        except Exception as e:
            error = e
            scope.reschedule(loop.time())
        else:
            timer = loop.call_later(period(), poll)

    timer = loop.call_later(period(), poll)
    try:
        async with asyncio.timeout(None) as scope:
            yield
    except TimeoutError:
        if error is None:
            raise
        raise error from None
    finally:
        if timer is not None:
            timer.cancel()
