"""Workers: take keys from the queue and work on them, a bounded number at once, until told to stop.

A key whose work raises is tried again after the queue's back-off; the error is
logged and counted, and ends nothing else.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pdcluster_operator.cluster.cache import Key
from pdcluster_operator.reconcile.queue import WorkQueue

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Done:
    """How the work on a key ended.

    look_again_seconds: when something is expected without an event; None = no sooner than the resync
    try_again:          something was refused: come back after the back-off
    """

    look_again_seconds: float | None = None
    try_again: bool = False


@dataclass
class Workers:
    """`num_workers` tasks that share one queue.

    work:     what is done for a key
    on_error: told of every exception of `work`
    """

    work: Callable[[Key], Awaitable[Done]]
    on_error: Callable[[], None]
    num_workers: int
    queue: WorkQueue[Key] = field(default_factory=WorkQueue)
    clock: Callable[[], float] = time.monotonic
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: bool = False

    def add(self, key: Key) -> None:
        """Make a key due now."""
        self.queue.add(key, self.clock())
        self._wake.set()

    async def run(self) -> None:
        """Work until `stop`; the keys in work are finished first."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.num_workers):
                group.create_task(self._loop())

    def stop(self) -> None:
        """Take no further key."""
        self._stopping = True
        self._wake.set()

    async def _loop(self) -> None:
        while not self._stopping:
            key = self.queue.take(self.clock())
            if key is None:
                await self._sleep()
            else:
                await self._work_on(key)

    async def _sleep(self) -> None:
        self._wake.clear()
        next_at = self.queue.next_at()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if next_at is None else max(0.0, next_at - self.clock())):
                await self._wake.wait()

    async def _work_on(self, key: Key) -> None:
        try:
            done = await self.work(key)
        except Exception:
            self.on_error()
            delay = self.queue.failed(key, self.clock())
            logger.exception("reconcile failed key=%s retry_seconds=%.1f", key, delay)
        else:
            if done.try_again:
                self.queue.failed(key, self.clock())
            else:
                self.queue.succeeded(key, self.clock(), done.look_again_seconds)
        self._wake.set()
