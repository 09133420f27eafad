"""Shared memory in which data-parallel engines publish their state, in words never torn."""

import mmap
import os
from collections.abc import Callable

from pdcluster_worker.engine.prefill_delayer import RankState

STALE_SECONDS = 2.0  # longer than most steps

_SLOT_WORDS = 8  # a cache line of its own for each engine
_WORD_BYTES = 8
_MOST = (1 << 16) - 1


def create_board(size: int) -> int:
    """Descriptor to be inherited by so many engines."""
    descriptor = os.memfd_create("pdcluster-ranks")
    os.ftruncate(descriptor, size * _SLOT_WORDS * _WORD_BYTES)
    return descriptor


class DpBoard:
    """A `prefill_delayer.Board` of one rank.  clock: monotonic seconds, equal in all processes."""

    def __init__(self, descriptor: int, rank: int, clock: Callable[[], float]) -> None:
        length = os.fstat(descriptor).st_size
        self._words = memoryview(mmap.mmap(descriptor, length)).cast("Q")
        self._own = rank * _SLOT_WORDS
        self._slots = range(0, len(self._words), _SLOT_WORDS)
        self._clock = clock

    def publish(self, state: RankState) -> None:
        self._words[self._own + 1] = _pack(state)
        self._words[self._own] = self._now()

    def withdraw(self) -> None:
        self._words[self._own + 1] = 0

    def others(self) -> list[RankState]:
        """Fresh entries of other engines."""
        oldest = self._now() - int(STALE_SECONDS * 1e9)
        slots = [
            slot
            for slot in self._slots
            if slot != self._own and self._words[slot] >= max(1, oldest)
        ]
        return [_unpack(word) for slot in slots if (word := self._words[slot + 1])]

    def _now(self) -> int:
        return int(self._clock() * 1e9)


def _pack(state: RankState) -> int:
    flags = 1 | state.prefillable << 1 | state.below_watermark << 2 | state.timed_out << 3
    counts = (state.running, state.max_prefill, state.waiting)
    return flags | sum(min(count, _MOST) << 4 + 16 * place for place, count in enumerate(counts))


def _unpack(word: int) -> RankState:
    running, max_prefill, waiting = (word >> 4 + 16 * place & _MOST for place in range(3))
    flags = (bool(word >> place & 1) for place in (1, 2, 3))
    prefillable, below_watermark, timed_out = flags
    return RankState(prefillable, below_watermark, running, max_prefill, waiting, timed_out)
