"""Queue runners: take keys from the queue and work on them, a bounded number at once, until
stopped.

Work on a key keeps processor and API server busy, so a second one beside it
would make both slower and nothing sooner; only beside work that takes long,
because it waits (for a webhook, a busy server, an etcd), another is begun.
A key whose work raises is tried again after the queue's back-off; the error is
logged and counted, and ends nothing else.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pdcluster_api.apiserver.body import Key
from pdcluster_operator.queue.work_queue import WorkQueue

logger = logging.getLogger(__name__)
BLOCKED_AFTER_SECONDS = 0.5
"""Age of work that is taken to be waiting: some times the duration of a reconcile that makes
everything.
"""


@dataclass(frozen=True)
class Done:
    """Result of the work on a key.

    requeue_after_seconds: until a change is expected without an event; None = no sooner than the
                           resync
    try_again:          something was refused: come back after the back-off
    wrote:              something was written, or tried to be
    """

    requeue_after_seconds: float | None = None
    try_again: bool = False
    wrote: bool = False


@dataclass
class QueueRunner:
    """`num_workers` tasks that share one queue.

    work:          what is done for a key
    on_error:      called with every exception of `work`
    waits_seconds: the age of work beside which more is begun
    """

    work: Callable[[Key], Awaitable[Done]]
    on_error: Callable[[], None]
    num_workers: int
    queue: WorkQueue[Key] = field(default_factory=WorkQueue)
    clock: Callable[[], float] = time.monotonic
    waits_seconds: float = BLOCKED_AFTER_SECONDS
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: bool = False

    def add(self, key: Key) -> None:
        """Enqueue a key now."""
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
            free_at = self._free_at()
            key = None if free_at > self.clock() else self.queue.take(self.clock())
            if key is None:
                await self._sleep(free_at)
            else:
                await self._work_on(key)
                # work that finds nothing to do never waits, and a thousand keys in a row would stop
                # all else
                await asyncio.sleep(0)

    def _free_at(self) -> float:
        """Time when all work will be waiting, so that more may be begun; work that ends earlier
        wakes it.
        """
        now = self.clock()
        return max(
            (now - age + self.waits_seconds for _, age in self.queue.in_work(now)), default=now
        )

    async def _sleep(self, free_at: float) -> None:
        self._wake.clear()
        next_at = self.clock() if self.queue.depth else self.queue.next_at()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(
                None if next_at is None else max(next_at, free_at) - self.clock()
            ):
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
                self.queue.succeeded(key, self.clock(), done.requeue_after_seconds)
        self._wake.set()
