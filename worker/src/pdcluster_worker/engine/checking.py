"""Checks the block pool of an idle engine, a slice a turn, so that a request that comes meanwhile never waits for all of it.

A walk looks at every block once after something has happened, then rests.  What
happens in the middle of a walk is no fault: the walk goes on with the next
blocks, on new knowledge of who holds what, and looks at all of them once more.
"""

from collections import Counter
from collections.abc import Callable

from pdcluster_worker.engine.block_pool import BlockPool

SLICE_BLOCKS = 1024
"""Blocks of one turn: about 1 ms."""


class PoolWalk:
    """One per engine.  holders: how many live requests and sends hold each block, now."""

    def __init__(self, pool: BlockPool, holders: Callable[[], Counter[int]]) -> None:
        self._pool = pool
        self._holders = holders
        self._held: Counter[int] = Counter()
        self._seen = bytearray()  # blocks met on the free stack
        self._num_moves = 0  # of the pool, when `_held` and `_seen` began
        self._num_left = pool.num_blocks  # blocks still to look at
        self._next_block = 0
        self._next_free = 0  # position on the free stack
        self._begin()

    @property
    def is_due(self) -> bool:
        """Whether anything has happened that was not looked at whole."""
        return self._num_left > 0 or self._pool.num_moves != self._num_moves

    def turn(self) -> None:
        """Check the next slice.  Raises AssertionError."""
        pool = self._pool
        if pool.num_moves != self._num_moves:
            self._begin()
        self._pool.check_totals()
        stop = min(self._next_block + SLICE_BLOCKS, pool.num_blocks)
        pool.check_blocks(range(self._next_block, stop), self._held)
        self._num_left -= stop - self._next_block
        self._next_block = stop % pool.num_blocks
        pool.check_free(range(self._next_free, self._next_free + SLICE_BLOCKS), self._seen)
        self._next_free += SLICE_BLOCKS

    def _begin(self) -> None:
        self._num_moves = self._pool.num_moves
        self._held = self._holders()
        self._seen = bytearray(self._pool.num_blocks)
        self._num_left = self._pool.num_blocks
        self._next_free = 0
