"""The cache keeps what is written, block by block and byte by byte, in the layout of
docs/kv-blocks.md: in memory that the host reads, and with copies to and from a device (on a CPU
by the same copies).
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.kv_cache import DeviceKVCache, KVCache
from pdcluster_worker.model.kv_size import block_num_bytes
from pdcluster_worker.model.memory import reserve_shared
from pdcluster_worker.model.rank_layout import ParallelRank

GEOMETRY = KVGeometry(num_kv_heads=3, head_dim=8, num_layers=2, block_size=4, dtype="bfloat16")
# see `make gpu-run`
DEVICE = torch.device("cuda" if os.environ.get("PDCLUSTER_GPU_CHECK") == "1" else "cpu")

MakeCache = Callable[..., KVCache | DeviceKVCache]


@pytest.fixture(params=[KVCache, lambda *given: DeviceKVCache(*given, DEVICE)])
def make_cache(request: pytest.FixtureRequest) -> MakeCache:
    make: MakeCache = request.param
    return make


def filled(cache: KVCache | DeviceKVCache) -> KVCache | DeviceKVCache:
    cache.tensor.normal_()
    if cache.tensor.is_cuda:  # as a step is waited for before its blocks are read
        torch.cuda.synchronize()
    return cache


def device_cache(num_blocks: int = 4, first_head: int = 0) -> DeviceKVCache:
    return DeviceKVCache(GEOMETRY, num_blocks, DEVICE, first_head)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_is_its_documented_bytes_in_both_kinds_of_cache(dtype: str) -> None:
    geometry = KVGeometry(3, 8, 2, 4, dtype)
    device, host = filled(DeviceKVCache(geometry, 4, DEVICE)), KVCache(geometry, 4)
    host.tensor.copy_(device.tensor)

    assert device.tensor.shape == host.tensor.shape == (4, 3, 2, 2, 4, 8)
    assert device.block_bytes == host.block_bytes == block_num_bytes(geometry)
    for block in range(4):
        expected = device.tensor[block].cpu().flatten().view(torch.uint8).numpy().tobytes()
        assert device.block(block) == host.block(block) == expected


def test_landed_bytes_are_the_block_and_no_other(make_cache: MakeCache) -> None:
    source, target = filled(make_cache(GEOMETRY, 4)), filled(make_cache(GEOMETRY, 6))
    before = target.tensor.clone()

    staging = target.staging(5)
    staging[:] = source.block(2)
    target.write_block(5, staging)

    assert torch.equal(target.tensor[5], source.tensor[2])
    assert torch.equal(target.tensor[:5], before[:5])


def test_nothing_counts_on_a_device_before_it_lands_and_a_copy_is_of_its_moment() -> None:
    cache = filled(device_cache())
    before, held = cache.tensor.clone(), cache.block(1)
    copy = bytes(held)
    cache.staging(3)[:] = held
    assert torch.equal(cache.tensor, before)
    cache.tensor.zero_()
    assert bytes(held) == copy


def test_heads_of_a_rank_leave_and_land_alone() -> None:
    source, target = filled(device_cache()), device_cache(first_head=3)
    assert (source.heads, target.heads) == (range(3), range(3, 6))

    staging = target.staging(1, range(4, 6))
    staging[:] = source.block(2, range(1, 3))
    target.write_block(1, staging, range(4, 6))

    assert torch.equal(target.tensor[1, 1:], source.tensor[2, 1:])
    assert not target.tensor[1, 0].any()
    assert not target.tensor[0].any()


def test_heads_of_a_block_are_one_run_of_its_bytes(make_cache: MakeCache) -> None:
    cache = filled(make_cache(GEOMETRY, 3))
    assert b"".join(cache.block(1, range(head, head + 1)) for head in range(3)) == cache.block(1)
    assert len(cache.block(2, range(1, 3))) == 2 * cache.head_bytes


def test_rank_moves_its_own_heads_of_the_memory_that_all_share() -> None:
    geometry = KVGeometry(4, 8, 2, 4, "float32")
    memory = reserve_shared("KV blocks", 3 * block_num_bytes(geometry))
    try:
        first, second = (
            KVCache(geometry, 3, memory, ParallelRank(tensor_size=2, rank=rank))
            for rank in range(2)
        )
    finally:
        os.close(memory)
    first.tensor.normal_()
    assert (first.heads, second.heads) == (range(2), range(2, 4))
    assert bytes(first.block(1)) + bytes(second.block(1)) == first.block(1, range(4))


def test_slots_hold_heads_of_blocks_and_bytes_where_the_cache_is() -> None:
    source, target = filled(device_cache()), device_cache()
    size, heads = source.head_bytes, range(1, 3)
    slots = source.slots(4 * size)
    assert (slots.device is None) == (DEVICE.type == "cpu")
    assert slots.device == slots.array.device.index
    assert slots.address == slots.array.data_ptr()
    assert slots.read(0, 4 * size) == bytes(4 * size)

    slots.load(size, 2, heads)
    slots.write(3 * size, b"probe")

    assert slots.read(size, size) == bytes(source.block(2, range(1, 2)))
    assert slots.read(3 * size, 5) == b"probe"
    slots.load(size, 2, heads)
    other = target.slots(4 * size)
    other.write(size, slots.read(size, 2 * size))
    other.write_block(size, 3, heads)
    assert torch.equal(target.tensor[3, 1:], source.tensor[2, 1:])
    assert not target.tensor[3, 0].any()
    assert not target.tensor[:3].any()


@pytest.mark.parametrize("block_id", [-1, 4])
def test_block_outside_the_cache_is_an_error(make_cache: MakeCache, block_id: int) -> None:
    cache = make_cache(GEOMETRY, 4)
    with pytest.raises(IndexError, match="there are 4"):
        cache.block(block_id)
    with pytest.raises(IndexError, match="there are 4"):
        cache.staging(block_id)
    with pytest.raises(IndexError, match="there are 4"):
        device_cache().slots(1 << 10).load(0, block_id, range(3))


def test_more_than_there_is_room_for_is_refused_with_the_bytes_and_the_fix(
    make_cache: MakeCache,
) -> None:
    with pytest.raises(
        ModelError,
        match=rf"{(1 << 48) * block_num_bytes(GEOMETRY)} bytes.*lower engine\.kvCacheMemory",
    ):
        make_cache(GEOMETRY, 1 << 48)


def test_untouched_blocks_cost_no_memory() -> None:
    def resident_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    before = resident_kib()
    cache = KVCache(GEOMETRY, (1 << 30) // block_num_bytes(GEOMETRY))
    assert cache.num_blocks > 1000
    assert resident_kib() - before < 100_000
