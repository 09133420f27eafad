"""The queue runner: takes keys from the queue and works on them, a bounded number at once, until
stopped.

Work that writes objects keeps processor and API server busy, so a second one beside it would make
both slower and nothing sooner.  Another is begun only beside one that reads or reports
(`write_gate`), and beside work that takes long, because it waits for a webhook, a busy server or
an etcd (docs/design/overlapping-reconciles.md).  A key whose work raises is tried again after
the queue's back-off; the error is logged and counted, and ends nothing else.
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
    """Shared by the reconciles and the runner that begins them.

    on_open: called when no write closes it any more
    """

    on_open: Callable[[], None] | None = None
    _num_writing: int = 0

    @property
    def is_open(self) -> bool:
        """Return whether another reconcile may begin beside one."""
        return not self._num_writing

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Keep it closed while objects are written."""
        self._num_writing += 1
        try:
            yield
        finally:
            self._num_writing -= 1
            if self.is_open and self.on_open is not None:
                self.on_open()


AT_ONCE = 2
"""Keys in work that are not taken to be waiting, where the gate is open."""

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
    """Works on the keys of one queue.

    work:          what is done for a key
    on_error:      called with every exception of `work`
    most:          keys in work at a time
    gate:          of another beside one
    waits_seconds: the age of work that is taken to be waiting
    """

    work: Callable[[Key], Awaitable[Done]]
    on_error: Callable[[], None]
    most: int
    queue: WorkQueue[Key] = field(default_factory=WorkQueue)
    clock: Callable[[], float] = time.monotonic
    gate: WriteGate = field(default_factory=WriteGate)
    waits_seconds: float = BLOCKED_AFTER_SECONDS
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: bool = False

    def __post_init__(self) -> None:
        self.gate.on_open = self._wake.set

    def add(self, key: Key) -> None:
        """Enqueue a key now."""
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
        """Take no further key."""
        self._stopping = True
        self._wake.set()

    def _free_at(self, now: float) -> float:
        """Time when another key may be begun, if none in work ends before; work that ends wakes
        the runner.
        """
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
