"""The KV cache: one run of memory, `[num_blocks, num_kv_heads, num_layers, 2, block_size,
head_dim]`.

A block is one contiguous run of bytes, and so is the part of it that belongs to
some of the heads, which is what a transport moves (`engine.ports.KVMemory`).
Memory is taken from the system page by page as blocks are first written.  Which
request owns which block is the engine's business.
"""

import contextlib
import mmap

import torch

from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.parallel.place import ONE_RANK, Place
from pdcluster_worker.model.parallel.shared import attach

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def block_num_bytes(geometry: KVGeometry) -> int:
    """Bytes of one block."""
    values = (
        geometry.num_kv_heads * geometry.num_layers * 2 * geometry.block_size * geometry.head_dim
    )
    return values * DTYPES[geometry.dtype].itemsize


LEAST_TOKENS = 64
"""Fewest tokens, prompt and output, of a request that is of use: a chat template with its own
system prompt takes about 30, and a completion is 16 long where its request does not say.
"""


def least_blocks(block_size: int) -> int:
    """Blocks that hold a request of `LEAST_TOKENS`, and one to spare for a hand-over."""
    return 1 + -(-LEAST_TOKENS // block_size)


def blocks_that_fit(geometry: KVGeometry, memory_bytes: int) -> int:
    """Blocks in this much memory.

    Raises ModelError for fewer than two: one request needs at least that to decode past a block.
    """
    num_blocks = memory_bytes // block_num_bytes(geometry)
    if num_blocks < 2:
        needed = least_blocks(geometry.block_size)
        raise ModelError(
            f"engine.kvCacheMemory of {memory_bytes} bytes holds {num_blocks} KV blocks of "
            f"{block_num_bytes(geometry)} bytes, but {needed} are needed for a request of "
            f"{LEAST_TOKENS} tokens: raise it to {needed * block_num_bytes(geometry)} or more"
        )
    return num_blocks


def check_num_blocks(num_blocks: int, block_size: int) -> None:
    """Raise ModelError for fewer than two."""
    if num_blocks < 2:
        raise ModelError(
            f"engine.numBlocks={num_blocks} is too few: at least 2 KV blocks are needed, and "
            f"{least_blocks(block_size)} for a request of {LEAST_TOKENS} tokens: raise it"
        )


class KVCache:
    """The memory as a tensor, and its bytes for a transport.

    heads: those that this process moves; its ranks share one cache, of all heads.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_blocks: int,
        descriptor: int | None = None,
        place: Place = ONE_RANK,
    ) -> None:
        """descriptor: memory that the ranks of an engine share (`parallel.shared`); None = memory
        of its own.

        place: of the rank that this process is
        """
        check_num_blocks(num_blocks, geometry.block_size)
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.block_bytes = block_num_bytes(geometry)
        self.heads = place.moved_heads(geometry.num_kv_heads)
        self.head_bytes = self.block_bytes // geometry.num_kv_heads
        self._bytes = (
            _reserve(num_blocks * self.block_bytes) if descriptor is None else attach(descriptor)
        )
        self.tensor = torch.frombuffer(self._bytes, dtype=DTYPES[geometry.dtype]).view(
            num_blocks,
            geometry.num_kv_heads,
            geometry.num_layers,
            2,
            geometry.block_size,
            geometry.head_dim,
        )

    def part(self, place: Place) -> torch.Tensor:
        """The heads and layers of one rank of the engine, contiguous from the layers on."""
        layers = place.layers(self.geometry.num_layers)
        return self.tensor[:, place.share(self.geometry.num_kv_heads), layers.start : layers.stop]

    def block(self, block_id: int, heads: range | None = None) -> memoryview:
        """The writable bytes of these heads of one block.

        Raises IndexError for a block that does not exist.
        """
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"KV block {block_id} does not exist: there are {self.num_blocks}")
        start, part = block_id * self.block_bytes, heads or self.heads
        return memoryview(self._bytes)[
            start + part.start * self.head_bytes : start + part.stop * self.head_bytes
        ]

    def landing(self, block_id: int, heads: range | None = None) -> memoryview:
        """The block itself."""
        return self.block(block_id, heads)

    def land(self, block_id: int, landing: memoryview, heads: range | None = None) -> None:
        """Nothing is left to do."""


def _reserve(num_bytes: int) -> mmap.mmap:
    """Zeroed private memory, page-aligned, that costs nothing until it is touched; in huge pages
    where Linux gives them.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as e:
        reason = getattr(e, "strerror", None) or e
        raise ModelError(
            f"cannot reserve {num_bytes} bytes for KV blocks ({reason}): lower "
            "engine.kvCacheMemory or engine.numBlocks"
        ) from e
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
