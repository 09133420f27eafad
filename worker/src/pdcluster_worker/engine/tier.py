"""One tier below the block pool: its slots, rates and counters, and whether it answers; and what is
read from tiers.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from math import inf

import msgspec

from pdcluster_schema.backoff import Backoff
from pdcluster_worker.engine.tier_ports import TierFacts
from pdcluster_worker.engine.tier_rates import Rate
from pdcluster_worker.engine.tier_slots import TierSlots
from pdcluster_worker.messages.engine import TierStats

logger = logging.getLogger(__name__)

STUCK_SECONDS = 5.0
"""Time without an answer after which a tier is left alone: a disk may not answer for hours."""

SHARED_STUCK_SECONDS = 1.0
"""The same for reads of a store of several workers: other requests ask it too, and it is further
away.
"""

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


class Unanswered:
    """Copies of one kind that are under way, and since when none of them was answered."""

    def __init__(self, stuck_after: float) -> None:
        self.num = 0
        self._stuck_after = stuck_after
        self._heard = 0.0  # by the clock: the last answer, or the first copy begun

    def begin(self, now: float) -> None:
        if not self.num:
            self._heard = now
        self.num += 1

    def end(self, now: float) -> None:
        self.num -= 1
        self._heard = now

    def wait_again(self, now: float) -> None:
        self._heard = now

    def stuck_seconds(self, now: float) -> float | None:
        """In how many seconds they count as stuck unless one is answered, 0 = they do; None = none
        is under way.
        """
        return max(0.0, self._heard + self._stuck_after - now) if self.num else None


class Tier:
    def __init__(self, facts: TierFacts) -> None:
        self.name = facts.name
        self.is_shared = bool(facts.store)
        self.slots = TierSlots(facts.num_slots)
        self.load_rate = Rate()  # seconds of one block
        self.silence = Pause()  # of reads and lookups
        self.fullness = Pause()  # of writes
        self.reads = Unanswered(SHARED_STUCK_SECONDS if self.is_shared else STUCK_SECONDS)
        self.writes = Unanswered(STUCK_SECONDS)
        self.stats = TierStats(facts.name, facts.num_slots, store=facts.store)
        for slot, key in facts.stored:
            self.slots.restore(slot, key)
        if facts.stored:
            self.slots.restored()

    def take_stats(self) -> TierStats:
        counts = self.slots.counts()
        return msgspec.structs.replace(
            self.stats, stored=counts["stored"] + counts["removed"], reason=self.reason
        )

    @property
    def reason(self) -> str:
        """Cause for which it takes no blocks or is not read now; empty = it works."""
        return self.fullness.reason or self.silence.reason

    def is_read(self, now: float) -> bool:
        """After failures, one read at a time finds out whether it answers again."""
        return self.silence.allows(now) and not (self.silence.reason and self.reads.num)

    def num_writes(self, now: float, most: int) -> int:
        """Writes that may be under way at a time."""
        if not (self.silence.allows(now) and self.fullness.allows(now)):
            return 0
        return 1 if self.silence.reason or self.fullness.reason else most

    def check_writes(self, now: float) -> None:
        """Fail where it has answered none for too long; they keep their blocks until it does."""
        if self.writes.stuck_seconds(now) == 0.0:
            self.fail("it does not answer", now, self.fullness)
            self.writes.wait_again(now)

    def fail(self, reason: str, now: float, pause: Pause | None = None) -> None:
        """pause: of the calls that failed; by default reads and lookups."""
        pause = pause or self.silence
        if not pause.reason:
            what = "takes no blocks" if pause is self.fullness else "is not read"
            logger.error("kv tier %s for now tier=%s: %s", what, self.name, reason)
        self.stats.failures += 1
        pause.fail(reason, now)

    def succeed(self, *pauses: Pause) -> None:
        """pauses: those that end; by default that of reads and lookups."""
        for pause in pauses or (self.silence,):
            if pause.reason:
                logger.info("kv tier answers again tier=%s", self.name)
                pause.end()


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
