"""KV blocks without prefixes: a pool that counts them, for the many requests of large clusters."""

from collections.abc import Sequence
from typing import cast

from pdcluster_worker.engine.block_pool import BlockPool


class CountedPool(BlockPool):
    """As `BlockPool` where no block has a hash: which one a request has makes no difference."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(0)
        self.num_blocks = num_blocks
        self._num_free = num_blocks

    @property
    def num_available(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> list[int]:
        assert count <= self._num_free, f"{count} blocks of {self._num_free} free ones"
        self._num_free -= count
        return cast("list[int]", range(count))

    def release(self, block_ids: Sequence[int]) -> None:
        self._num_free += len(block_ids)
        assert self._num_free <= self.num_blocks, "more blocks are free than there are"
