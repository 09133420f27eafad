"""Leading blocks of a prompt in each worker's prefix cache; it may lag behind."""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import islice, repeat
from math import inf


class GapCheck(Enum):
    """SKIP: already applied, or before the snapshot that closes a gap."""

    APPLY = "take"
    SKIP = "pass"
    GET_SNAPSHOT = "ask snapshot"


class EventOrder:
    """Sequence check of one sender's numbered events; after a gap only a snapshot counts."""

    def __init__(self) -> None:
        self._last = 0
        self._has_gap = False

    def arrival(self, number: int, *, is_whole: bool = False) -> GapCheck:
        """is_whole: the event is a snapshot and needs no earlier one."""
        if number <= self._last or (self._has_gap and not is_whole):
            return GapCheck.SKIP
        if number > self._last + 1 and not is_whole:
            self._has_gap = True
            return GapCheck.GET_SNAPSHOT
        self._last, self._has_gap = number, False
        return GapCheck.APPLY


MAX_BLOCKS = 2_000_000  # 0.25 GB (bench/results)

_CLEARED_AT_ONCE = 4096  # blocks a call, to bound its time
_EVICTED_AT_ONCE = 4096
_FIRST_LOOKUPS = 4  # an unknown prompt costs only these
_LOOKUPS_AT_ONCE = 32


SHARED_CREDIT = 0.5
"""Part of a hit that a block in a shared store counts as: to read it takes longer than a hit in the
worker's own cache, and less than to compute it.
"""


def credited(num_own: int, num_shared: int) -> int:
    """Leading blocks that a worker has itself, and for part those that it finds in a store.

    >>> credited(4, 0), credited(4, 10), credited(10, 4)
    (4, 7, 10)
    """
    return num_own + int(SHARED_CREDIT * max(0, num_shared - num_own))


class PrefixIndex:
    """From the workers' events, one table from block hash to a bit set of workers, so one walk over
    a prompt's hashes covers all.

    Beyond `max_blocks` the oldest blocks go: a missed hit costs less than a false one.

    A block of any worker of a shared store is in that store too, or soon, so all its workers have
    credit for it (`credited`).
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._table: dict[bytes, int] = {}
        self._max_blocks = max_blocks
        self._bits: dict[str, int] = {}  # of each worker, one bit
        self._stores: dict[str, str] = {}  # of each worker that has one
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._retired = 0  # bits dropped since clearing began
        self._clearing = 0  # bits being cleared
        self._uncleared: list[bytes] = []  # blocks still to check

    def __len__(self) -> int:
        """Distinct blocks, those still to be cleared included."""
        return len(self._table)

    def snapshot(self, worker: str, hashes: Iterable[bytes]) -> None:
        store = self._stores.get(worker, "")
        self.drop(worker)
        self.apply(worker, hashes, ())
        self.share(worker, store)

    def apply(self, worker: str, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """A hash in both lists ends as removed: a missed hit costs less than a false one."""
        bit, table = self._bits.get(worker) or self._new_bit(worker), self._table
        before = after = 0  # equal masks share one int: lookups touch less memory
        for block in stored:
            mask = table.get(block, 0)
            if not mask & bit:
                if mask != before:
                    before, after = mask, mask | bit
                table[block] = after if mask else bit
        for block in removed:
            mask = table.get(block, 0)
            if mask == bit:
                del table[block]
            elif mask & bit:
                table[block] = mask ^ bit
        while len(table) > self._max_blocks:
            too_many = len(table) - self._max_blocks
            for block in list(
                islice(table, max(too_many, min(_EVICTED_AT_ONCE, len(table) // 16)))
            ):
                del table[block]
        self._clear_some()

    def drop(self, worker: str) -> None:
        """Unknown workers are a no-op."""
        self._retired |= self._bits.pop(worker, 0)
        self._stores.pop(worker, None)
        self._clear_some()

    def share(self, worker: str, store: str) -> None:
        """It reads from and writes to this store; "" = from none."""
        if store:
            self._stores[worker] = store
        else:
            self._stores.pop(worker, None)

    def hashes(self, worker: str) -> frozenset[bytes]:
        """Walks the whole index."""
        bit = self._bits.get(worker, 0)
        return frozenset(block for block, mask in self._table.items() if mask & bit)

    def match(self, worker: str, hashes: Sequence[bytes]) -> int:
        """Leading blocks of `hashes` that the worker has, or has credit for."""
        num_own = self._leading(hashes, self._bits.get(worker, 0))
        return credited(num_own, self.match_store(self._stores.get(worker, ""), hashes))

    def match_store(self, store: str, hashes: Sequence[bytes]) -> int:
        """Leading blocks of `hashes` that workers of a store have, together."""
        mask = 0
        for worker, its_store in self._stores.items():
            mask |= self._bits.get(worker, 0) if its_store == store else 0
        return self._leading(hashes, mask)

    def match_all(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Leading blocks of `hashes` that each worker has, or has credit for; workers with none are
        left out.
        """
        found = self._match_own(hashes)
        in_store = {store: self.match_store(store, hashes) for store in {*self._stores.values()}}
        for worker, store in self._stores.items():
            if num_blocks := credited(found.get(worker, 0), in_store[store]):
                found[worker] = num_blocks
        return found

    def _leading(self, hashes: Sequence[bytes], mask: int) -> int:
        table = self._table
        for num_matched, block in enumerate(hashes):
            if not table.get(block, 0) & mask:
                return num_matched
        return len(hashes)

    def _match_own(self, hashes: Sequence[bytes]) -> dict[str, int]:
        matching, get = sum(self._bits.values()), self._table.get
        ended: list[tuple[int, int]] = []  # (bits of workers, leading blocks that they have)
        end = 0
        while end < len(hashes) and matching:
            start, end = end, end + (_LOOKUPS_AT_ONCE if end else _FIRST_LOOKUPS)
            masks = list(map(get, hashes[start:end], repeat(0)))
            if masks.count(masks[0]) == len(masks):
                # usually all equal: compared in C, since every request does this
                del masks[1:]
            for offset, mask in enumerate(masks):
                if mask & matching != matching:
                    ended.append((matching & ~mask, start + offset))
                    matching &= mask
        ended.append((matching, len(hashes)))
        bits_of = self._bits.items()
        return {
            worker: num_blocks
            for bits, num_blocks in ended
            if bits and num_blocks
            for worker, bit in bits_of
            if bits & bit
        }

    def _new_bit(self, worker: str) -> int:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self._num_bits
            self._num_bits += 1
        self._bits[worker] = bit
        return bit

    def _clear_some(self) -> None:
        """Clear dropped bits from some blocks; after the last block the bits are reused."""
        if not self._clearing:
            if not self._retired:
                return
            self._clearing, self._retired, self._uncleared = self._retired, 0, list(self._table)
        table, kept = self._table, ~self._clearing
        for block in self._uncleared[-_CLEARED_AT_ONCE:]:
            mask = table.get(block, 0)
            if mask & kept:
                table[block] = mask & kept
            elif mask:
                del table[block]
        del self._uncleared[-_CLEARED_AT_ONCE:]
        if not self._uncleared:
            self._free_bits += [1 << n for n in range(self._num_bits) if self._clearing >> n & 1]
            self._clearing = 0


RECENT_SECONDS = 120.0

MAX_RECENT_BLOCKS = 500_000  # (block, worker) pairs; beyond it the oldest are dropped


class RecentPrefixes:
    """Without events: what was recently sent to a worker is in its cache.

    Times are seconds of a monotonic clock.
    """

    def __init__(
        self, seconds: float = RECENT_SECONDS, max_blocks: int = MAX_RECENT_BLOCKS
    ) -> None:
        self.seconds = seconds
        self._max_blocks = max_blocks
        # when each block was last sent to each worker
        self._sent: dict[bytes, dict[str, float]] = {}
        self._dropped: dict[str, float] = {}  # when a worker's cache was last known to be empty
        self._order: deque[tuple[float, bytes, str]] = deque()

    def __len__(self) -> int:
        """Entries, repeated ones included."""
        return len(self._order)

    def note(self, worker: str, hashes: Sequence[bytes], now: float) -> None:
        for block in hashes:
            self._sent.setdefault(block, {})[worker] = now
            self._order.append((now, block, worker))
        while self._order and (
            len(self._order) > self._max_blocks or now - self._order[0][0] > self.seconds
        ):
            self._forget(*self._order.popleft())

    def match_all(
        self, hashes: Sequence[bytes], now: float, within: float | None = None
    ) -> dict[str, int]:
        """within: seconds, at most and by default those of the index."""
        since = now - (self.seconds if within is None else min(within, self.seconds))
        first = self._sent.get(hashes[0], {}) if hashes else {}
        found = {
            worker: self._match(worker, hashes, max(since, self._dropped.get(worker, since)))
            for worker in first
        }
        return {worker: num_blocks for worker, num_blocks in found.items() if num_blocks}

    def _match(self, worker: str, hashes: Sequence[bytes], since: float) -> int:
        """Leading blocks that were sent to the worker at `since` or later."""
        sent = self._sent
        for num_before, block in enumerate(hashes):
            workers = sent.get(block)
            if workers is None or workers.get(worker, -inf) < since:
                return num_before
        return len(hashes)

    def drop(self, worker: str, now: float) -> None:
        """The worker's cache is gone."""
        self._dropped[worker] = now
        for key in [key for key, when in self._dropped.items() if now - when > self.seconds]:
            del self._dropped[key]

    def _forget(self, when: float, block: bytes, worker: str) -> None:
        """Keep a block that was sent to the same worker again since."""
        workers = self._sent.get(block, {})
        if workers.get(worker) == when:
            del workers[worker]
            if not workers:
                del self._sent[block]
