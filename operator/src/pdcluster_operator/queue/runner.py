"""The queue runner: works on a bounded number of keys at once until stopped. None is begun beside a
reconcile that writes, two at once otherwise, more beside one that takes long
(docs/design/overlapping-reconciles.md).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

from pdcluster_api.apiserver.kinds import Key
from pdcluster_operator.queue.work_queue import WorkQueue

logger = logging.getLogger(__name__)


@dataclass
class WriteGate:
    """Shared by the reconciles and the runner that begins them."""

    on_open: Callable[[], None] | None = None  # called when no write closes it any more
    _num_writing: int = 0

    @property
    def is_open(self) -> bool:
        """Return whether another reconcile may begin beside one."""
        return not self._num_writing

    @contextmanager
    def closed(self) -> Iterator[None]:
        self._num_writing += 1
        try:
            yield
        finally:
            self._num_writing -= 1
            if self.is_open and self.on_open is not None:
                self.on_open()


AT_ONCE = 2  # Keys in work that are not taken to be waiting, where the gate is open

# Age of work that is taken to be waiting: some times the duration of a reconcile that makes
# everything
BLOCKED_AFTER_SECONDS = 0.5


@dataclass(frozen=True)
class Done:
    """Result of the work on a key."""

    # until a change is expected without an event; None = no sooner than the resync
    requeue_after_seconds: float | None = None
    try_again: bool = False  # something was refused: come back after the back-off
    wrote: bool = False  # something was written, or tried to be


@dataclass
class QueueRunner:
    """Works on the keys of one queue."""

    work: Callable[[Key], Awaitable[Done]]  # what is done for a key
    on_error: Callable[[], None]  # called with every exception of `work`
    most: int  # keys in work at a time
    queue: WorkQueue[Key] = field(default_factory=WorkQueue)
    clock: Callable[[], float] = time.monotonic
    gate: WriteGate = field(default_factory=WriteGate)  # of another beside one
    waits_seconds: float = BLOCKED_AFTER_SECONDS  # the age of work that is taken to be waiting
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: bool = False

    def __post_init__(self) -> None:
        self.gate.on_open = self._wake.set

    def add(self, key: Key) -> None:
        self.queue.add(key, self.clock())
        self._wake.set()  # it waits for the gate where that is closed

    async def run(self) -> None:
        """Work until `stop`; the keys in work are finished first."""
        async with asyncio.TaskGroup() as group:
            while not self._stopping:
                now = self.clock()
                key = None if self._free_at(now) > now else self.queue.take(now)
                if key is None:
                    await self._sleep()
                else:
                    group.create_task(self._work_on(key), name=f"work on {key}")
                    # work that finds nothing to do never waits, and a thousand keys in a row would
                    # stop all else
                    await asyncio.sleep(0)

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def _free_at(self, now: float) -> float:
        since = sorted(now - age for _, age in self.queue.in_work(now))
        if len(since) >= self.most:
            return inf
        at_once = AT_ONCE if self.gate.is_open else 1
        return now if len(since) < at_once else max(now, since[-at_once] + self.waits_seconds)

    async def _sleep(self) -> None:
        self._wake.clear()
        now = self.clock()
        next_at = now if self.queue.depth else self.queue.next_at()
        until = inf if next_at is None else max(next_at, self._free_at(now))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if until == inf else until - now):
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
