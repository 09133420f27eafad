"""The KV cache on a device.  Copies of blocks use a stream of their own, which waits for no step: a
block is sent after the step that wrote it, and a received block is in no running step.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.kv_cache import (
    DTYPES,
    KVCache,
    block_num_bytes,
    blocks_that_fit,
)
from pdcluster_worker.model.ops.graphs import graph_sizes
from pdcluster_worker.model.prompt_logprobs import MOST_ROWS
from pdcluster_worker.model.sampling.row_chunks import device_chunk_bytes
from pdcluster_worker.system.cgroups import memory_limit

logger = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # its classes have no types

# memory of a step without weights and KV blocks, per token of its budget: an estimate
STEP_BYTES_PER_TOKEN = 512 << 10

# of a step's logits, without the graphs': its own, rows with masks, masked rows, all rows, booleans
SAMPLING_COPIES = 5
SCORING_COPIES = 3  # of a part's logits: its own, the scored rows, and booleans of the sampled rows


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    total: int  # bytes
    taken: int  # bytes after loading weights, by all processes


def open_cache(
    geometry: KVGeometry,
    engine: EngineConfig,
    device: torch.device,
    vocab_size: int,
    weight_bytes: int,
    *,
    drafts_for: EngineConfig | None = None,
) -> "KVCache | DeviceKVCache":
    """Raises ModelError where it does not fit.

    drafts_for: the engine that this draft model is for; None = not a draft model.
    """
    cache: KVCache | DeviceKVCache
    if device.type == "cpu":
        num_blocks = blocks_that_fit(geometry, engine, drafts_for)
        check_memory(weight_bytes, num_blocks * block_num_bytes(geometry), engine, memory_limit())
        cache = KVCache(geometry, num_blocks)
    else:
        memory = device_memory(engine, device, weight_bytes)
        num_blocks = device_blocks(geometry, engine, memory, vocab_size, drafts_for)
        cache = DeviceKVCache(geometry, num_blocks, device)
    tokens = cache.num_blocks * geometry.block_size
    logger.info(
        "reserved kv cache blocks=%d block_bytes=%d tokens=%d",
        cache.num_blocks,
        cache.block_bytes,
        tokens,
    )
    return cache


def check_memory(weight_bytes: int, kv_bytes: int, engine: EngineConfig, limit: int | None) -> None:
    """Refuse what the kernel would kill later: pages are only taken when they are used.

    limit: memory of the container or the machine; None = unknown.  Raises ModelError.
    """
    needed = (weight_bytes + kv_bytes) * engine.data_parallel_size
    if limit is not None and needed > limit:
        each = f" for each of {engine.data_parallel_size} engines"
        field = "numBlocks" if engine.num_blocks else "kvCacheMemory"
        raise ModelError(
            f"{weight_bytes} bytes of weights and {kv_bytes} of KV blocks"
            f"{each if engine.data_parallel_size > 1 else ''} do not fit into the memory of this "
            f"worker, {limit} bytes: lower engine.{field}, or give it more (in a cluster: the "
            "memory limit of its role's resources)"
        )


def device_memory(engine: EngineConfig, device: torch.device, weight_bytes: int) -> DeviceMemory:
    """Each of several engines has a share of the device, whatever the others use now."""
    free, total = torch.cuda.mem_get_info(device)
    taken = 0 if engine.data_parallel_size > 1 else total - free
    return DeviceMemory(total, taken + weight_bytes)


def device_blocks(
    geometry: KVGeometry,
    engine: EngineConfig,
    memory: DeviceMemory,
    vocab_size: int,
    drafts_for: EngineConfig | None = None,
) -> int:
    """`numBlocks`, or what weights and steps leave of `deviceMemoryShare`, else `kvCacheMemory`."""
    share = engine.device_memory_share
    if share is None or engine.num_blocks is not None:
        return blocks_that_fit(geometry, engine, drafts_for)
    steps = STEP_BYTES_PER_TOKEN * engine.max_batched_tokens + logits_bytes(engine, vocab_size)
    left = int(share * memory.total) - memory.taken - steps
    if left < 2 * block_num_bytes(geometry):
        raise ModelError(
            f"engine.deviceMemoryShare of {share} is {int(share * memory.total)} bytes of this "
            f"device, of which {memory.taken} are taken "
            f"(weights and other processes) and {steps} are for steps, so no KV blocks fit: raise "
            "it, lower "
            "engine.maxBatchedTokens or engine.maxSequences, or use a larger device"
        )
    return left // block_num_bytes(geometry)


def logits_bytes(engine: EngineConfig, vocab_size: int) -> int:
    """Device memory for float32 logits and sampling: calculated, not measured."""
    most = engine.max_decode_rows
    copies = max(SAMPLING_COPIES * most, SCORING_COPIES * MOST_ROWS)
    num_rows = sum(graph_sizes(most)) + copies
    return 4 * vocab_size * num_rows + device_chunk_bytes(vocab_size * max(most, MOST_ROWS))


class DeviceKVCache:
    """A `KVMemory`.  tensor: `[blocks, Hkv, layers, 2, block_size, D]` on the device."""

    def __init__(
        self, geometry: KVGeometry, num_blocks: int, device: torch.device, first_head: int = 0
    ) -> None:
        """geometry: of this part; first_head: its first head in the model.  Raises ModelError."""
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.block_bytes = block_num_bytes(geometry)
        self.heads = range(first_head, first_head + geometry.num_kv_heads)
        self.head_bytes = self.block_bytes // geometry.num_kv_heads
        size = (
            num_blocks,
            geometry.num_kv_heads,
            geometry.num_layers,
            2,
            geometry.block_size,
            geometry.head_dim,
        )
        try:
            self.tensor = torch.zeros(size, dtype=DTYPES[geometry.dtype], device=device)
        # such as torch.OutOfMemoryError, and the error for an impossible size
        except RuntimeError as e:
            raise ModelError(
                f"{device} has no room for {num_blocks * self.block_bytes} bytes of KV blocks: "
                "lower engine.kvCacheMemory, engine.deviceMemoryShare or engine.numBlocks"
            ) from e
        self._blocks = self.tensor.view(num_blocks, geometry.num_kv_heads, -1).view(torch.uint8)
        self._stream = _cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:  # writes come after the zeros
            self._stream.wait_stream(torch.cuda.default_stream(device))

    def block(self, block_id: int, heads: range | None = None) -> memoryview:
        """A copy of these heads of one block.  Raises IndexError for an unknown block."""
        copy = self.staging(block_id, heads)
        self.copy(torch.frombuffer(copy, dtype=torch.uint8), self.part(block_id, heads))
        return copy

    def staging(self, block_id: int, heads: range | None = None) -> memoryview:
        """Pinned memory, not written yet.  Raises IndexError for a block that does not exist."""
        num_bytes = len(self.part(block_id, heads))
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)
        return host.numpy().data

    def write_block(self, block_id: int, staging: memoryview, heads: range | None = None) -> None:
        """Copy to the device; complete on return."""
        self.copy(self.part(block_id, heads), torch.frombuffer(staging, dtype=torch.uint8))

    def slots(self, num_bytes: int) -> "DeviceSlots":
        with torch.cuda.stream(self._stream):  # torch reuses memory for the stream that had it
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self.tensor.device)
        if self._stream is not None:
            self._stream.synchronize()  # carriers do not know streams
        return DeviceSlots(self, memory)

    def part(self, block_id: int, heads: range | None = None) -> torch.Tensor:
        """Contiguous bytes on the device.  Raises IndexError for a block that does not exist."""
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"KV block {block_id} does not exist: there are {self.num_blocks}")
        held = heads or self.heads
        first = self.heads.start
        return self._blocks[block_id, held.start - first : held.stop - first].view(-1)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """To, from or on the device, without waiting for steps; complete on return."""
        if self._stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = _cuda.Event()
            done.record()
        done.synchronize()  # of this copy only, not of those of other threads


class DeviceSlots:
    """A `SlotMemory` on the device of a cache."""

    def __init__(self, cache: DeviceKVCache, memory: torch.Tensor) -> None:
        self._cache = cache
        self.array = memory
        self.address = memory.data_ptr()
        self.device: int | None = memory.device.index

    def write(self, start: int, data: bytes) -> None:
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._cache.copy(self.array[start : start + len(data)], source)

    def read(self, start: int, num_bytes: int) -> bytes:
        target = torch.empty(num_bytes, dtype=torch.uint8)
        self._cache.copy(target, self.array[start : start + num_bytes])
        return target.numpy().tobytes()

    def load(self, start: int, block_id: int, heads: range) -> None:
        part = self._cache.part(block_id, heads)
        self._cache.copy(self.array[start : start + len(part)], part)

    def write_block(self, start: int, block_id: int, heads: range) -> None:
        part = self._cache.part(block_id, heads)
        self._cache.copy(part, self.array[start : start + len(part)])
