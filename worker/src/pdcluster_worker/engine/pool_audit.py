"""Checks the block pool of an idle engine slice by slice, so that no request waits for it."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

from pdcluster_worker.engine.block_pool import BlockPool, BlockState

SLICE_BLOCKS = 1024
"""Blocks of one turn, and holds counted in one: about 1 ms."""


CHECK_INTERVALS = 100
"""Time between two turns of an idle engine, as a multiple of what the last one took."""


class PoolAuditor:
    """One per engine.  holders: blocks held by live requests and sends, once for each hold."""

    def __init__(
        self, pool: BlockPool, holders: Callable[[], Iterator[int]], clock: Callable[[], float]
    ) -> None:
        self._pool = pool
        self._holders = holders
        self._clock = clock
        self._next = clock()  # when a turn is due
        self._uncounted: Iterator[int] | None = None  # what `_held` lacks; None: nothing
        self._held: Counter[int] = Counter()
        self._found = [0] * len(BlockState)  # blocks met, by state
        self._seen = bytearray()  # blocks met on the free stack
        self._num_moves = 0  # of the pool, when all of these began
        self._num_left = pool.num_blocks  # blocks still to look at
        self._next_block = 0
        self._next_free = 0  # position on the free stack
        self._begin()

    @property
    def is_due(self) -> bool:
        return self._num_left > 0 or self._pool.num_moves != self._num_moves

    def next_seconds(self, now: float) -> float | None:
        """In how many seconds a turn is due, 0 for now; None while nothing is left to look at."""
        return max(0.0, self._next - now) if self.is_due else None

    def turn(self) -> None:
        started = self._clock()
        if self._pool.num_moves != self._num_moves:
            self._begin()
        self._pool.check_totals()
        if self._uncounted is None or self._count_holds(self._uncounted):
            self._poll()
        self._next = started + CHECK_INTERVALS * (self._clock() - started)

    def _begin(self) -> None:
        self._num_moves = self._pool.num_moves
        self._uncounted = self._holders()
        self._held = Counter()
        self._found = [0] * len(BlockState)
        self._seen = bytearray(self._pool.num_blocks)
        self._num_left = self._pool.num_blocks
        self._next_free = 0

    def _count_holds(self, uncounted: Iterator[int]) -> bool:
        counted = list(islice(uncounted, SLICE_BLOCKS))
        self._held.update(counted)
        if len(counted) == SLICE_BLOCKS:
            return False
        self._uncounted = None
        return True

    def _poll(self) -> None:
        pool = self._pool
        block_ids = range(
            self._next_block,
            min(self._next_block + min(SLICE_BLOCKS, self._num_left), pool.num_blocks),
        )
        pool.check_blocks(block_ids, self._held)
        self._found = [
            sum(counts) for counts in zip(self._found, pool.count_states(block_ids), strict=True)
        ]
        self._num_left -= len(block_ids)
        self._next_block = block_ids.stop % pool.num_blocks
        pool.check_free(range(self._next_free, self._next_free + SLICE_BLOCKS), self._seen)
        self._next_free += SLICE_BLOCKS
        if self._num_left == 0:
            pool.check_counts(self._found)
