"""Checks the block pool of an idle engine, a slice a turn, so that a request that comes meanwhile
never waits for all of it.

A walk counts the references of each block, then looks at every block once after something has
happened, then rests.  What happens in the middle of a walk is no fault: it
counts again, goes on with the next blocks and looks at all of them once more.
No turn grows with the pool: one of a million blocks takes no longer.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

from pdcluster_worker.engine.block_pool import BlockPool, BlockState

SLICE_BLOCKS = 1024
"""Blocks of one turn, and holds counted in one: about 1 ms."""


CHECK_INTERVALS = 100
"""Time between two turns of the walk of an idle engine, as a multiple of what the last one took."""


class PoolAuditor:
    """One per engine.  holders: blocks held by live requests and sends, once for each hold."""

    def __init__(self, pool: BlockPool, holders: Callable[[], Iterator[int]]) -> None:
        self._pool = pool
        self._holders = holders
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
        """True if anything has changed since the last whole check."""
        return self._num_left > 0 or self._pool.num_moves != self._num_moves

    def turn(self) -> None:
        """Check the next slice.  Raises AssertionError."""
        if self._pool.num_moves != self._num_moves:
            self._begin()
        self._pool.check_totals()
        if self._uncounted is None or self._count_holds(self._uncounted):
            self._poll()

    def _begin(self) -> None:
        self._num_moves = self._pool.num_moves
        self._uncounted = self._holders()
        self._held = Counter()
        self._found = [0] * len(BlockState)
        self._seen = bytearray(self._pool.num_blocks)
        self._num_left = self._pool.num_blocks
        self._next_free = 0

    def _count_holds(self, uncounted: Iterator[int]) -> bool:
        """Count a slice of holds; whether those were the last."""
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


class IdleCheck:
    """Schedule of the walk's turns in an idle engine: at most a hundredth of the time is spent on
    it.
    """

    def __init__(self, walk: PoolAuditor, clock: Callable[[], float]) -> None:
        self._walk = walk
        self._clock = clock
        self._next = clock()

    def next_seconds(self, now: float) -> float | None:
        """In how many seconds a turn is due, 0 for now; None while nothing is left to look at."""
        return max(0.0, self._next - now) if self._walk.is_due else None

    def turn(self) -> None:
        """Check the next slice.  Raises AssertionError."""
        started = self._clock()
        self._walk.turn()
        self._next = started + CHECK_INTERVALS * (self._clock() - started)
