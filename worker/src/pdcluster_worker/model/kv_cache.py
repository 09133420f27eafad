"""The KV cache, contiguous; its shape is `kv_size.cache_tensor`.

On a device copies of blocks use a stream of their own, which waits for no step: a block is sent
after the step that wrote it, and a received block is in no running step.
"""

import logging
from typing import Any

import torch

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.kv_size import (
    block_num_bytes,
    blocks_that_fit,
    cache_tensor,
    check_host_tier,
    check_memory,
    device_blocks,
)
from pdcluster_worker.model.memory import attach, reserve_private
from pdcluster_worker.model.rank_layout import ONE_RANK, ParallelRank
from pdcluster_worker.system.cgroups import memory_limit

logger = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # its classes have no types


def open_cache(
    geometry: KVGeometry,
    engine: EngineConfig,
    device: torch.device,
    vocab_size: int,
    weight_bytes: int,
    *,
    adapter_bytes: int = 0,
    expert_bytes: int = 0,
    drafts_for: EngineConfig | None = None,
) -> "KVCache | DeviceKVCache":
    """Raises ModelError where it does not fit.

    adapter_bytes: of the weights, for the message.
    expert_bytes: of the longest step.
    drafts_for: the engine that this draft model is for; None = not a draft model.
    """
    cache: KVCache | DeviceKVCache
    if device.type == "cpu":
        num_blocks = blocks_that_fit(geometry, engine, drafts_for)
        kv_bytes = num_blocks * block_num_bytes(geometry)
        check_memory(
            *(weight_bytes, kv_bytes, engine, memory_limit()),
            adapter_bytes=adapter_bytes,
            expert_bytes=expert_bytes,
        )
        cache = KVCache(geometry, num_blocks)
    else:
        check_host_tier(engine, memory_limit())
        total, taken = device_memory(engine, device)
        taken += weight_bytes
        num_blocks = device_blocks(
            geometry, engine, vocab_size, total=total, taken=taken, drafts_for=drafts_for
        )
        cache = DeviceKVCache(geometry, num_blocks, device)
    logger.info(
        "reserved kv cache blocks=%d block_bytes=%d tokens=%d",
        cache.num_blocks,
        cache.block_bytes,
        cache.num_blocks * geometry.block_size,
    )
    return cache


def device_memory(engine: EngineConfig, device: torch.device) -> tuple[int, int]:
    """Bytes of the device, and those taken; of several engines each counts only its own."""
    free, total = torch.cuda.mem_get_info(device)
    return total, 0 if engine.data_parallel_size > 1 else total - free


class CacheSizes:
    """Sizes of a cache.  heads: those that this process transfers."""

    def __init__(self, geometry: KVGeometry, num_blocks: int, heads: range) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.heads = heads
        self.block_bytes = block_num_bytes(geometry)
        self.head_bytes = self.block_bytes // geometry.num_kv_heads

    def check(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"KV block {block_id} does not exist: there are {self.num_blocks}")


class KVCache(CacheSizes):
    """In host memory; an engine's ranks share one cache of all heads."""

    def __init__(
        self,
        geometry: KVGeometry,
        num_blocks: int,
        descriptor: int | None = None,
        place: ParallelRank = ONE_RANK,
    ) -> None:
        """descriptor: of `memory.reserve_shared`; None = its own memory."""
        super().__init__(geometry, num_blocks, place.moved_heads(geometry.num_kv_heads))
        self._bytes = (
            reserve_private("KV blocks", num_blocks * self.block_bytes)
            if descriptor is None
            else attach(descriptor)
        )
        dtype, shape = cache_tensor(geometry, num_blocks)
        self.tensor = torch.frombuffer(self._bytes, dtype=dtype).view(shape)

    def part(self, place: ParallelRank) -> torch.Tensor:
        """Heads and layers of one rank, contiguous from the layers on."""
        layers = place.layers(self.geometry.num_layers)
        return self.tensor[:, place.share(self.geometry.num_kv_heads), layers.start : layers.stop]

    def block(self, block_id: int, heads: range | None = None) -> memoryview:
        """Writable bytes of these heads of one block.  Raises IndexError for an unknown block."""
        self.check(block_id)
        start, part = block_id * self.block_bytes, heads or self.heads
        return memoryview(self._bytes)[
            start + part.start * self.head_bytes : start + part.stop * self.head_bytes
        ]

    def staging(self, block_id: int, heads: range | None = None) -> memoryview:
        return self.block(block_id, heads)

    def write_block(self, block_id: int, staging: memoryview, heads: range | None = None) -> None:
        """Nothing to do: the staging memory is the block."""


class DeviceKVCache(CacheSizes):
    def __init__(
        self, geometry: KVGeometry, num_blocks: int, device: torch.device, first_head: int = 0
    ) -> None:
        """geometry: of this part; first_head: its first head in the model.  Raises ModelError."""
        super().__init__(
            geometry, num_blocks, range(first_head, first_head + geometry.num_kv_heads)
        )
        dtype, shape = cache_tensor(geometry, num_blocks)
        try:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        # such as torch.OutOfMemoryError, and the error for an impossible size
        except RuntimeError as e:
            raise ModelError(
                f"{device} has no room for {num_blocks * self.block_bytes} bytes of KV blocks: "
                "lower engine.kvCacheMemory, engine.deviceMemoryShare or engine.numBlocks"
            ) from e
        self._blocks = self.tensor.view(num_blocks, geometry.num_kv_heads, -1).view(torch.uint8)
        # before the kernels of steps, which may be long
        self._stream = _cuda.Stream(device, priority=-1) if device.type == "cuda" else None
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
        self.check(block_id)
        held, first = heads or self.heads, self.heads.start
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
