"""The work queue: keys that are due, in work, or scheduled. Pure: times are passed in, in seconds.
One worker at a time per key; adds meanwhile count as one and enqueue it again when that is done.

Its runner works on a bounded number of keys at once until stopped. None is begun beside a
reconcile that writes, two at once otherwise, more beside one that takes long
(docs/design/overlapping-reconciles.md).
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, TypeVar

from pdcluster_api.apiserver.kinds import Key
from pdcluster_schema.backoff import Backoff

KeyT = TypeVar("KeyT")
RETRY = Backoff(first=0.5, most=120.0)
# Forgotten times kept before they are cleared away: some lie months ahead, and each reconcile adds
# one
_SPARE = 64


@dataclass
class WorkQueue(Generic[KeyT]):
    """Keys that are due (with the time since when), in work, dirty or scheduled."""

    backoff: Backoff = RETRY
    _due: "OrderedDict[KeyT, float]" = field(default_factory=OrderedDict)
    _processing: dict[KeyT, float] = field(default_factory=dict)
    _dirty: set[KeyT] = field(default_factory=set)
    _later: dict[KeyT, float] = field(default_factory=dict)
    # a heap of all that was scheduled (time, order, key), of which only what `_later` says still
    # counts
    _times: list[tuple[float, int, KeyT]] = field(default_factory=list)
    _num_times: int = 0
    _moved: float = -inf
    _failures: dict[KeyT, int] = field(default_factory=dict)

    def add(self, key: KeyT, now: float) -> None:
        if key in self._processing:
            self._dirty.add(key)
        else:
            self._due.setdefault(key, now)

    def add_at(self, key: KeyT, when: float) -> None:
        """Enqueue a key at a time; the earlier of two times counts."""
        if when < self._later.get(key, inf):
            self._later[key] = when
            self._num_times += 1
            heappush(self._times, (when, self._num_times, key))
            if len(self._times) > 2 * len(self._later) + _SPARE:
                self._times = [
                    entry for entry in self._times if self._later.get(entry[2]) == entry[0]
                ]
                heapify(self._times)

    def take(self, now: float) -> KeyT | None:
        """The key that has been due longest, now in work; None when none is due."""
        while (next_at := self.next_at()) is not None and next_at <= now:
            _, _, key = heappop(self._times)
            del self._later[key]
            self.add(key, now)
        if not self._due:
            return None
        key, _ = self._due.popitem(last=False)
        self._processing[key] = self._moved = now
        self._later.pop(key, None)
        return key

    def succeeded(self, key: KeyT, now: float, requeue_after_seconds: float | None = None) -> None:
        """End the work on a key and forget its failures; enqueue it after `requeue_after_seconds`,
        if given; with 0 as the next: it has more to do, and is not to wait for all others.
        """
        self._failures.pop(key, None)
        self._finish(key, now)
        if requeue_after_seconds == 0.0:
            self.add(key, now)
            self._due.move_to_end(key, last=False)
        elif requeue_after_seconds is not None:
            self.add_at(key, now + requeue_after_seconds)

    def failed(self, key: KeyT, now: float) -> float:
        """End the work on a key; it is enqueued after the back-off, whose seconds are returned."""
        self._failures[key] = self._failures.get(key, 0) + 1
        delay = self.backoff.after(self._failures[key])
        self._finish(key, now)
        self.add_at(key, now + delay)
        return delay

    def _finish(self, key: KeyT, now: float) -> None:
        del self._processing[key]
        self._moved = now
        if key in self._dirty:
            self._dirty.remove(key)
            self.add(key, now)

    @property
    def depth(self) -> int:
        return len(self._due)

    def next_at(self) -> float | None:
        while self._times and self._later.get(self._times[0][2]) != self._times[0][0]:
            heappop(self._times)  # what it was scheduled for has been forgotten, or brought forward
        return self._times[0][0] if self._times else None

    def stood_still(self, now: float) -> float:
        return now - max(self._moved, next(iter(self._due.values()))) if self._due else 0.0

    def in_work(self, now: float) -> Iterator[tuple[KeyT, float]]:
        """Keys in work, each with the seconds since it was taken."""
        return ((key, now - since) for key, since in self._processing.items())


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
