"""The KV cache of ranks on several GPUs, by CUDA IPC for pipeline stages; never run on GPUs."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.kv_cache import CacheSizes, DeviceKVCache, device_memory
from pdcluster_worker.model.kv_size import blocks_that_fit, cache_tensor, device_blocks
from pdcluster_worker.model.rank_layout import ParallelRank

# as `UntypedStorage._share_cuda_` gives it
_Handle = tuple[int, bytes, int, int, bytes, int, bytes, bool]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Handle).decode
_storage: Any = torch.UntypedStorage  # its calls for other processes have no types


def part_geometry(geometry: KVGeometry, place: ParallelRank) -> KVGeometry:
    return msgspec.structs.replace(
        geometry,
        num_kv_heads=geometry.num_kv_heads // place.tensor_size,
        num_layers=len(place.layers(geometry.num_layers)),
    )


def blocks_on_devices(
    geometry: KVGeometry,
    engine: EngineConfig,
    place: ParallelRank,
    vocab_size: int,
    weight_bytes: int,
) -> int:
    """`kvCacheMemory` of all GPUs, or what fits beside rank 0's weights."""
    if engine.num_blocks is not None or engine.device_memory_share is None:
        return blocks_that_fit(geometry, engine)
    total, taken = device_memory(engine, torch.device("cuda"))
    taken += weight_bytes // place.num_ranks
    part = part_geometry(geometry, place)
    return device_blocks(part, engine, vocab_size, total=total, taken=taken)


def rank_cache(
    geometry: KVGeometry, num_blocks: int, place: ParallelRank, device: torch.device
) -> DeviceKVCache:
    """The heads and layers of one rank.  Raises ModelError where they do not fit."""
    first_head = place.share(geometry.num_kv_heads).start
    return DeviceKVCache(part_geometry(geometry, place), num_blocks, device, first_head)


def handle_of(part: Tensor) -> bytes:
    """CUDA IPC handle; the part must outlive its mappings."""
    storage: Any = part.untyped_storage()
    return _encode(storage._share_cuda_())


def mapped(handle: bytes, geometry: KVGeometry, num_blocks: int, place: ParallelRank) -> Tensor:
    """Another rank's part, on its device."""
    arguments = _decode(handle)
    storage = _storage._new_shared_cuda(*arguments)
    dtype, shape = cache_tensor(part_geometry(geometry, place), num_blocks)
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage).view(shape)


class RanksDeviceCache(CacheSizes):
    """parts: of all ranks in order.  A block is read after every rank has answered."""

    def __init__(
        self, geometry: KVGeometry, num_blocks: int, parts: Sequence[tuple[ParallelRank, Tensor]]
    ) -> None:
        super().__init__(geometry, num_blocks, range(geometry.num_kv_heads))
        self.tensor = parts[0][1]
        self._parts = parts

    def block(self, block_id: int, heads: range | None = None) -> memoryview:
        """A copy of these heads of one block.  Raises IndexError for an unknown block."""
        copy = self.staging(block_id, heads)
        for host, device in self._shares(block_id, copy, heads or self.heads):
            host.copy_(device)
        return copy

    def staging(self, block_id: int, heads: range | None = None) -> memoryview:
        """Host memory, not written yet.  Raises IndexError for a block that does not exist."""
        self.check(block_id)
        num_bytes = len(heads or self.heads) * self.head_bytes
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.tensor.is_cuda)
        return host.numpy().data

    def write_block(self, block_id: int, staging: memoryview, heads: range | None = None) -> None:
        """Copy to all devices; complete on return."""
        for host, device in self._shares(block_id, staging, heads or self.heads):
            device.copy_(host)
            if device.is_cuda:
                torch.cuda.current_stream(device.device).synchronize()

    def _shares(
        self, block_id: int, staging: memoryview, heads: range
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(host, device) views for each part that has some of these heads."""
        geometry = self.geometry
        dtype, (_, _, *sizes) = cache_tensor(geometry, 1)
        host = torch.frombuffer(staging, dtype=dtype).view(len(heads), *sizes)
        for place, part in self._parts:
            held, layers = place.share(geometry.num_kv_heads), place.layers(geometry.num_layers)
            first, end = max(held.start, heads.start), min(held.stop, heads.stop)
            if first < end:
                mine = part[block_id, first - held.start : end - held.start]
                yield (
                    host[first - heads.start : end - heads.start, layers.start : layers.stop],
                    mine,
                )
