"""The KV memory of one rank, of a model with four KV heads."""

import os

NUM_HEADS, NUM_BLOCKS, HEAD_BYTES = 4, 8, 16


class RankMemory:
    """KVMemory of one rank: its heads of all blocks."""

    num_blocks = NUM_BLOCKS
    head_bytes = HEAD_BYTES

    def __init__(self, heads: range) -> None:
        self.heads = heads
        self._data = bytearray(os.urandom(NUM_BLOCKS * len(heads) * HEAD_BYTES))

    def block(self, block_id: int, heads: range | None = None) -> memoryview:
        held = heads or self.heads
        start = (block_id * len(self.heads) + held.start - self.heads.start) * HEAD_BYTES
        return memoryview(self._data)[start : start + len(held) * HEAD_BYTES]

    def staging(self, block_id: int, heads: range | None = None) -> memoryview:
        return self.block(block_id, heads)

    def write_block(
        self, block_id: int, staging: memoryview, heads: range | None = None
    ) -> None: ...
