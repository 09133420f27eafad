"""Index of the KV blocks in each worker's prefix cache, from its events; it may lag behind.

One table from block hash to a bit set of workers, so one walk over a prompt's hashes covers all.
"""

from collections.abc import Iterable, Sequence
from itertools import islice, repeat

MAX_BLOCKS = 2_000_000  # 0.25 GB (bench/results)

_CLEARED_AT_ONCE = 4096  # blocks a call, to bound its time
_EVICTED_AT_ONCE = 4096
_FIRST_LOOKUPS = 4  # an unknown prompt costs only these
_LOOKUPS_AT_ONCE = 32


class PrefixIndex:
    """Beyond `max_blocks` the oldest blocks go: a missed hit costs less than a false one."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._table: dict[bytes, int] = {}
        self._max_blocks = max_blocks
        self._bits: dict[str, int] = {}  # of each worker, one bit
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._retired = 0  # bits dropped since clearing began
        self._clearing = 0  # bits being cleared
        self._uncleared: list[bytes] = []  # blocks still to check

    def __len__(self) -> int:
        """Distinct blocks, those still to be cleared included."""
        return len(self._table)

    def snapshot(self, worker: str, hashes: Iterable[bytes]) -> None:
        self.drop(worker)
        self.apply(worker, hashes, ())

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
        self._clear_some()

    def hashes(self, worker: str) -> frozenset[bytes]:
        """Walks the whole index."""
        bit = self._bits.get(worker, 0)
        return frozenset(block for block, mask in self._table.items() if mask & bit)

    def match(self, worker: str, hashes: Sequence[bytes]) -> int:
        """Leading blocks of `hashes` that the worker has."""
        bit, table = self._bits.get(worker, 0), self._table
        for num_matched, block in enumerate(hashes):
            if not table.get(block, 0) & bit:
                return num_matched
        return len(hashes)

    def match_all(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Leading blocks of `hashes` that each worker has; workers with none are left out."""
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
