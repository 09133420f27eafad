"""One tier below the block pool: its slots, rates and counters, and whether it answers; and what is
read from tiers.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import inf

import msgspec

from pdcluster_schema.backoff import Backoff
from pdcluster_worker.engine.tier_ports import TierFacts
from pdcluster_worker.engine.tier_rates import Rate
from pdcluster_worker.engine.tier_slots import TierSlots
from pdcluster_worker.messages.engine import TierStats

STUCK_SECONDS = 5.0
"""Time without an answer after which a tier is not read: a disk may not answer for hours."""

SHARED_STUCK_SECONDS = 1.0
"""The same for a store of several workers: other requests ask it too, and it is further away."""

PAUSE = Backoff(first=1.0, most=30.0)
"""Seconds in which a tier that failed is left alone; one copy or lookup then tries it again."""


class Pause:
    """Failures in a row of one kind of call, and until when no more are made."""

    reason = ""  # of the last failure; empty = the last call did well
    _until = -inf
    _num_failures = 0

    def allows(self, now: float) -> bool:
        return now >= self._until

    def fail(self, reason: str, now: float) -> None:
        """Calls that were made before the pause count as one failure with it."""
        if self.allows(now):
            self._num_failures += 1
            self._until = now + PAUSE.after(self._num_failures)
        self.reason = reason or "unknown"

    def end(self) -> None:
        self.reason, self._until, self._num_failures = "", -inf, 0


class Tier:
    def __init__(self, facts: TierFacts) -> None:
        self.name = facts.name
        self.is_shared = bool(facts.store)
        self.slots = TierSlots(facts.num_slots)
        self.load_rate = Rate()  # seconds of one block
        self.silence = Pause()  # of reads and lookups
        self.fullness = Pause()  # of writes
        self.num_reading = 0
        self.stats = TierStats(facts.name, facts.num_slots, store=facts.store)
        self._heard = 0.0  # by the clock: the last answer to a read, or the first begun
        for slot, key in facts.stored:
            self.slots.restore(slot, key)
        if facts.stored:
            self.slots.restored()

    def take_stats(self) -> TierStats:
        counts = self.slots.counts()
        reason = self.fullness.reason or self.silence.reason
        return msgspec.structs.replace(
            self.stats, stored=counts["stored"] + counts["removed"], reason=reason
        )

    def is_read(self, now: float) -> bool:
        """After failures, one read at a time finds out whether it answers again."""
        return self.silence.allows(now) and not (self.silence.reason and self.num_reading)

    def num_writes(self, now: float, most: int) -> int:
        """Writes that may be under way at a time."""
        if not (self.silence.allows(now) and self.fullness.allows(now)):
            return 0
        return 1 if self.silence.reason or self.fullness.reason else most

    def begin_read(self, now: float) -> None:
        if not self.num_reading:
            self._heard = now
        self.num_reading += 1

    def end_read(self, now: float) -> None:
        self.num_reading -= 1
        self._heard = now

    def stuck_seconds(self, now: float) -> float | None:
        """In how many seconds its reads count as stuck unless one is answered, 0 = they do; None =
        none is under way.
        """
        if not self.num_reading:
            return None
        return max(0.0, self._heard + self._stuck_after - now)

    @property
    def _stuck_after(self) -> float:
        return SHARED_STUCK_SECONDS if self.is_shared else STUCK_SECONDS


@dataclass(slots=True, eq=False)
class Load:
    """Blocks that are read into the pool for one request, and for others that need them too."""

    keys: list[bytes]
    hits: list[int]  # blocks of the same prefix in the pool, held meanwhile
    blocks: dict[int, bytes]  # block -> what is read into it, in order
    started: float
    left: Counter[int] = field(default_factory=Counter)  # by tier
    due: float = inf  # when the requests that wait for it are better computed
    arrived: set[int] = field(default_factory=set)
    cancelled: bool = False
    seconds: float = 0.0  # from its start to its end
    tiers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """Blocks that follow a prefix hit: `keys` are read from `tiers`, `hits` are in the pool."""

    keys: list[bytes]
    tiers: list[int]  # of each of the keys
    hits: list[int]
    load: Load | None = None  # that reads the next block already
