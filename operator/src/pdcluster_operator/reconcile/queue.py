"""The work queue: which keys are due, which are being worked on, and when a failed one is tried again.

Pure: every method that depends on time takes the clock's value, in seconds.
A key is worked on by one worker at a time; an add meanwhile makes it due again
once that worker is done, and any number of adds count as one.  Taking a key
forgets what was scheduled for it: whoever works on it decides anew.
`workers` moves it with asyncio.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True)
class Backoff:
    """Seconds before a try: `first` after one failure, twice as long after each further one, `most` at the end."""

    first: float = 0.5
    most: float = 120.0

    def after(self, num_failures: int) -> float:
        """Seconds to wait after so many failures in a row."""
        return min(self.most, self.first * 2.0 ** min(num_failures - 1, 32))


@dataclass
class WorkQueue(Generic[Key]):
    """Keys that are due (with the time since when), in work, dirty (added while in work) or scheduled for later."""

    backoff: Backoff = Backoff()
    _due: "OrderedDict[Key, float]" = field(default_factory=OrderedDict)
    _taken: dict[Key, float] = field(default_factory=dict)
    _dirty: set[Key] = field(default_factory=set)
    _later: dict[Key, float] = field(default_factory=dict)
    _failures: dict[Key, int] = field(default_factory=dict)

    def add(self, key: Key, now: float) -> None:
        """Make a key due now."""
        if key in self._taken:
            self._dirty.add(key)
        else:
            self._due.setdefault(key, now)

    def add_at(self, key: Key, when: float) -> None:
        """Make a key due at a time; the earlier of two times counts."""
        self._later[key] = min(when, self._later.get(key, when))

    def take(self, now: float) -> Key | None:
        """The key that has been due longest, now in work; None when none is due."""
        for key in [key for key, when in self._later.items() if when <= now]:
            del self._later[key]
            self.add(key, now)
        if not self._due:
            return None
        key, _ = self._due.popitem(last=False)
        self._taken[key] = now
        self._later.pop(key, None)
        return key

    def succeeded(self, key: Key, now: float, look_again_seconds: float | None = None) -> None:
        """End the work on a key; its failures are forgotten, and it is due again after `look_again_seconds`, if given."""
        self._failures.pop(key, None)
        self._finish(key, now)
        if look_again_seconds is not None:
            self.add_at(key, now + look_again_seconds)

    def failed(self, key: Key, now: float) -> float:
        """End the work on a key; it is due again after the back-off, whose seconds are returned."""
        self._failures[key] = self._failures.get(key, 0) + 1
        delay = self.backoff.after(self._failures[key])
        self._finish(key, now)
        self.add_at(key, now + delay)
        return delay

    def _finish(self, key: Key, now: float) -> None:
        del self._taken[key]
        if key in self._dirty:
            self._dirty.remove(key)
            self.add(key, now)

    @property
    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._due)

    def next_at(self) -> float | None:
        """When the next scheduled key becomes due; None when none is scheduled."""
        return min(self._later.values(), default=None)

    def longest_wait(self, now: float) -> float:
        """Seconds that the first key in line has waited; 0 when none waits."""
        return now - next(iter(self._due.values())) if self._due else 0.0

    def in_work(self, now: float) -> Iterator[tuple[Key, float]]:
        """Keys in work, each with the seconds since it was taken."""
        return ((key, now - since) for key, since in self._taken.items())
