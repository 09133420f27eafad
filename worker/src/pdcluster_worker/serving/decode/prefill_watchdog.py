"""Waits for a peer while it makes progress."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdcluster_worker.errors import PeerError
from pdcluster_worker.messages.peers import WorkerLoad
from pdcluster_worker.serving.engines.stall_watch import StallTimer, period_seconds

MARGINS = 1.5
"""Margins of the peer that we wait: its own report, which comes after one, goes to all at once and
has the reason.
"""


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
