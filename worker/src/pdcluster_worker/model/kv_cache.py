"""The KV cache: `[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]`, contiguous."""

import contextlib
import mmap

import torch

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.kv_size_advice import check_num_blocks
from pdcluster_worker.model.parallel.rank_layout import ONE_RANK, ParallelRank
from pdcluster_worker.model.parallel.shared import attach

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def block_num_bytes(geometry: KVGeometry) -> int:
    values = (
        geometry.num_kv_heads * geometry.num_layers * 2 * geometry.block_size * geometry.head_dim
    )
    return values * DTYPES[geometry.dtype].itemsize


def blocks_that_fit(
    geometry: KVGeometry, engine: EngineConfig, drafts_for: EngineConfig | None = None
) -> int:
    """`numBlocks`, or what `kvCacheMemory` holds.  Raises ModelError for too few."""
    block_bytes = block_num_bytes(geometry)
    num_blocks = engine.num_blocks
    if num_blocks is None:
        num_blocks = engine.kv_cache_memory // block_bytes
    check_num_blocks(num_blocks, engine, block_bytes, drafts_for)
    return num_blocks


class KVCache:
    """heads: those that this process transfers; an engine's ranks share one cache of all heads."""

    def __init__(
        self,
        geometry: KVGeometry,
        num_blocks: int,
        descriptor: int | None = None,
        place: ParallelRank = ONE_RANK,
    ) -> None:
        """descriptor: shared memory of the ranks (`parallel.shared`); None = its own memory."""
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

    def part(self, place: ParallelRank) -> torch.Tensor:
        """Heads and layers of one rank, contiguous from the layers on."""
        layers = place.layers(self.geometry.num_layers)
        return self.tensor[:, place.share(self.geometry.num_kv_heads), layers.start : layers.stop]

    def block(self, block_id: int, heads: range | None = None) -> memoryview:
        """Writable bytes of these heads of one block.  Raises IndexError for an unknown block."""
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"KV block {block_id} does not exist: there are {self.num_blocks}")
        start, part = block_id * self.block_bytes, heads or self.heads
        return memoryview(self._bytes)[
            start + part.start * self.head_bytes : start + part.stop * self.head_bytes
        ]

    def staging(self, block_id: int, heads: range | None = None) -> memoryview:
        return self.block(block_id, heads)

    def write_block(self, block_id: int, staging: memoryview, heads: range | None = None) -> None:
        """Nothing to do: the staging memory is the block."""


def _reserve(num_bytes: int) -> mmap.mmap:
    """Zeroed private memory, page-aligned, in huge pages where possible, taken on first use."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as e:
        reason = getattr(e, "strerror", None) or e
        raise ModelError(
            f"cannot reserve {num_bytes} bytes for KV blocks ({reason}): lower "
            "engine.kvCacheMemory or engine.numBlocks"
        ) from e
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
