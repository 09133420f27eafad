"""The work queue: keys that are due, in work, or scheduled. Pure: times are passed in, in seconds.
One worker at a time per key; adds meanwhile count as one and enqueue it again when that is done.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, TypeVar

from pdcluster_schema.backoff import Backoff

Key = TypeVar("Key")
RETRY = Backoff(first=0.5, most=120.0)
# Forgotten times kept before they are cleared away: some lie months ahead, and each reconcile adds
# one
_SPARE = 64


@dataclass
class WorkQueue(Generic[Key]):
    """Keys that are due (with the time since when), in work, dirty or scheduled."""

    backoff: Backoff = RETRY
    _due: "OrderedDict[Key, float]" = field(default_factory=OrderedDict)
    _processing: dict[Key, float] = field(default_factory=dict)
    _dirty: set[Key] = field(default_factory=set)
    _later: dict[Key, float] = field(default_factory=dict)
    # a heap of all that was scheduled (time, order, key), of which only what `_later` says still
    # counts
    _times: list[tuple[float, int, Key]] = field(default_factory=list)
    _num_times: int = 0
    _moved: float = -inf
    _failures: dict[Key, int] = field(default_factory=dict)

    def add(self, key: Key, now: float) -> None:
        if key in self._processing:
            self._dirty.add(key)
        else:
            self._due.setdefault(key, now)

    def add_at(self, key: Key, when: float) -> None:
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

    def take(self, now: float) -> Key | None:
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

    def succeeded(self, key: Key, now: float, requeue_after_seconds: float | None = None) -> None:
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

    def failed(self, key: Key, now: float) -> float:
        """End the work on a key; it is enqueued after the back-off, whose seconds are returned."""
        self._failures[key] = self._failures.get(key, 0) + 1
        delay = self.backoff.after(self._failures[key])
        self._finish(key, now)
        self.add_at(key, now + delay)
        return delay

    def _finish(self, key: Key, now: float) -> None:
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

    def in_work(self, now: float) -> Iterator[tuple[Key, float]]:
        """Keys in work, each with the seconds since it was taken."""
        return ((key, now - since) for key, since in self._processing.items())
