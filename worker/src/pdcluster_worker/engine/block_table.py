"""Blocks of one request: what it needs, what it finds in the prefix cache, what it holds.

Guarantees that at least one token is always computed (at most (N-1)//block_size
hit blocks [V15]) and that only full, computed blocks get a hash.  Who is
admitted when is `engine.scheduler`'s and `engine.receiving`'s business.
"""

from dataclasses import dataclass

from pdcluster_worker.engine.block_pool import BlockPool, BlockState
from pdcluster_worker.engine.request import Request
from pdcluster_worker.engine.settings import EngineSettings


def ceil_div(numerator: int, denominator: int) -> int:
    """Integer division, rounded up."""
    return -(-numerator // denominator)


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a request would take.

    hits:       prefix blocks that it would share, in order.
    num_new:    private blocks beside them.
    num_needed: what both take from `BlockPool.num_available`: hits that nobody holds count too.
    """

    hits: list[int]
    num_new: int
    num_needed: int


class BlockTables:
    """Fills and empties `Request.block_table` from one pool."""

    def __init__(self, settings: EngineSettings, pool: BlockPool) -> None:
        self.pool = pool
        self._block_size = settings.block_size
        self._prefix_caching = settings.prefix_caching

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks for that many tokens."""
        return ceil_div(num_tokens, self._block_size)

    def reservation(self, request: Request, num_tokens: int) -> Reservation:
        """Blocks for `num_tokens` of a request that holds none, prefix hits of its known tokens reused."""
        hits: list[int] = []
        if self._prefix_caching:
            request.extend_hashes(self._block_size)
            hits = self.pool.prefix_cache.match(request.block_hashes, (request.num_tokens - 1) // self._block_size)
        num_new = self.num_blocks(num_tokens) - len(hits)
        idle_hits = sum(1 for block_id in hits if self.pool.state(block_id) is BlockState.CACHED)
        return Reservation(hits, num_new, num_new + idle_hits)

    def take(self, request: Request, reservation: Reservation) -> None:
        """Give the request its blocks; its KV is then computed up to the end of the hits."""
        assert not request.block_table, f"request {request.request_id} holds blocks already"
        self.pool.acquire(reservation.hits)
        request.block_table = [*reservation.hits, *self.pool.allocate(reservation.num_new)]
        request.num_computed_tokens = len(reservation.hits) * self._block_size

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Extend the table to `num_tokens`; False, with nothing taken, when blocks are short."""
        if num_tokens <= len(request.block_table) * self._block_size:
            return True
        missing = self.num_blocks(num_tokens) - len(request.block_table)
        if missing > self.pool.num_available:
            return False
        request.block_table += self.pool.allocate(missing)
        return True

    def advance(self, request: Request, num_tokens: int) -> None:
        """`num_tokens` more have their KV: hash the blocks that they fill."""
        computed = request.num_computed_tokens
        first = computed // self._block_size
        request.num_computed_tokens = computed + num_tokens
        last = (computed + num_tokens) // self._block_size
        if not self._prefix_caching or first == last:
            return
        request.extend_hashes(self._block_size)
        for index in range(first, last):
            self.pool.cache(request.block_table[index], request.block_hashes[index])

    def release(self, request: Request) -> None:
        """Drop the request's hold on all its blocks."""
        self.pool.release(request.block_table)
        request.block_table = []
        request.num_computed_tokens = 0
