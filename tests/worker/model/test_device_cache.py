"""The staging of a cache whose tensor the host cannot read: here on the CPU, with the
same copies.
"""

import os

import pytest
import torch

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.kv_cache import DeviceKVCache, KVCache, open_cache
from pdcluster_worker.model.kv_size import (
    STEP_BYTES_PER_TOKEN,
    block_num_bytes,
    check_memory,
    device_blocks,
    logits_bytes,
)
from pdcluster_worker.model.step_plan import row_sizes

GEOMETRY = KVGeometry(num_kv_heads=3, head_dim=8, num_layers=2, block_size=4, dtype="bfloat16")
CPU = torch.device("cpu")
# see `make gpu-run`
DEVICE = torch.device("cuda" if os.environ.get("PDCLUSTER_GPU_CHECK") == "1" else "cpu")


def filled(num_blocks: int = 4) -> DeviceKVCache:
    cache = DeviceKVCache(GEOMETRY, num_blocks, DEVICE)
    cache.tensor.normal_()
    if DEVICE.type == "cuda":  # as a step is waited for before its blocks are read
        torch.cuda.synchronize()
    return cache


def test_blocks_of_both_kinds_of_cache_are_the_same_bytes() -> None:
    device, host = filled(), KVCache(GEOMETRY, 4)
    host.tensor.copy_(device.tensor)

    assert device.tensor.shape == host.tensor.shape
    assert device.block_bytes == host.block_bytes == block_num_bytes(GEOMETRY)
    assert all(device.block(block) == host.block(block) for block in range(4))


def test_landed_bytes_are_the_block_and_no_other() -> None:
    source, target = filled(), filled(6)
    before = target.tensor.clone()
    staging = target.staging(5)
    staging[:] = source.block(2)
    assert torch.equal(target.tensor, before)  # nothing counts before it lands

    target.write_block(5, staging)

    assert torch.equal(target.tensor[5], source.tensor[2])
    assert torch.equal(target.tensor[:5], before[:5])


def test_heads_of_a_rank_leave_and_land_alone() -> None:
    source, target = filled(), DeviceKVCache(GEOMETRY, 4, DEVICE, first_head=3)
    assert (source.heads, target.heads) == (range(3), range(3, 6))

    staging = target.staging(1, range(4, 6))
    staging[:] = source.block(2, range(1, 3))
    target.write_block(1, staging, range(4, 6))

    assert torch.equal(target.tensor[1, 1:], source.tensor[2, 1:])
    assert not target.tensor[1, 0].any()
    assert not target.tensor[0].any()


def test_block_is_a_copy_of_its_moment() -> None:
    cache = filled()
    copy = bytes(cache.block(1))
    held = cache.block(1)
    cache.tensor.zero_()

    assert bytes(held) == copy


def test_slots_hold_heads_of_blocks_and_bytes_where_the_cache_is() -> None:
    source, target = filled(), DeviceKVCache(GEOMETRY, 4, DEVICE)
    size, heads = source.head_bytes, range(1, 3)
    slots = source.slots(4 * size)
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


def test_slots_say_where_they_are() -> None:
    slots = filled().slots(64)
    assert (slots.device is None) == (DEVICE.type == "cpu")
    assert slots.device == slots.array.device.index
    assert slots.address == slots.array.data_ptr()


@pytest.mark.parametrize("block_id", [-1, 4])
def test_block_outside_the_cache_is_an_error(block_id: int) -> None:
    with pytest.raises(IndexError, match="there are 4"):
        filled().block(block_id)
    with pytest.raises(IndexError, match="there are 4"):
        filled().staging(block_id)
    with pytest.raises(IndexError, match="there are 4"):
        filled().slots(1 << 10).load(0, block_id, range(3))


def test_no_room_is_refused_with_the_bytes_and_the_fix() -> None:
    size = (1 << 50) // block_num_bytes(GEOMETRY)
    with pytest.raises(
        ModelError, match=rf"{size * block_num_bytes(GEOMETRY)} bytes.*lower engine\.kvCacheMemory"
    ):
        DeviceKVCache(GEOMETRY, size, DEVICE)


GIB = 1 << 30


def engine_of(share: float | None) -> EngineConfig:
    return EngineConfig(
        device_memory_share=share, max_batched_tokens=1024, max_sequences=8, kv_cache_memory=GIB
    )


STEPS = STEP_BYTES_PER_TOKEN * 1024 + logits_bytes(engine_of(None), 1000)


def test_memory_for_logits_by_hand() -> None:
    """Graphs of 1, 2, 4 and 8 rows; a part of a prompt is of 256 rows, three times over."""
    of_rows = 4 * 1000 * (15 + 3 * 256)
    assert logits_bytes(engine_of(None), 1000) == of_rows + 32 * 256 * 1000
    wide = EngineConfig(max_batched_tokens=1024, max_sequences=1024)
    num_rows = sum(row_sizes(1024)) + 5 * 1024
    assert logits_bytes(wide, 100_000) == 400_000 * num_rows + 32 * (1 << 24)


def test_share_of_a_device_leaves_room_for_weights_and_steps() -> None:
    blocks = device_blocks(GEOMETRY, engine_of(0.5), 1000, total=80 * GIB, taken=16 * GIB)

    assert blocks == (24 * GIB - STEPS) // block_num_bytes(GEOMETRY)


def test_without_a_share_kv_cache_memory_counts() -> None:
    assert device_blocks(
        GEOMETRY, engine_of(None), 1000, total=80 * GIB, taken=0
    ) == GIB // block_num_bytes(GEOMETRY)


def test_share_without_room_is_refused_with_what_takes_it() -> None:
    with pytest.raises(ModelError) as refusal:
        device_blocks(GEOMETRY, engine_of(0.25), 1000, total=80 * GIB, taken=20 * GIB)

    for part in (
        "engine.deviceMemoryShare of 0.25",
        str(20 * GIB),
        str(STEPS),
        "raise it",
        "engine.maxBatchedTokens",
    ):
        assert part in str(refusal.value)


def test_share_is_of_no_effect_on_a_cpu() -> None:
    cache = open_cache(
        GEOMETRY,
        EngineConfig(device_memory_share=0.9, kv_cache_memory=1 << 20),
        CPU,
        vocab_size=1000,
        weight_bytes=0,
    )

    assert isinstance(cache, KVCache)
    assert cache.num_blocks == (1 << 20) // block_num_bytes(GEOMETRY)


def test_what_does_not_fit_into_the_memory_of_the_worker_is_refused_with_the_bytes() -> None:
    check_memory(3 * GIB, GIB, EngineConfig(), 4 * GIB)
    check_memory(3 * GIB, GIB, EngineConfig(), None)
    with pytest.raises(ModelError) as refusal:
        check_memory(3 * GIB, GIB + 1, EngineConfig(), 4 * GIB)
    words = (str(3 * GIB), str(GIB + 1), str(4 * GIB), "lower engine.kvCacheMemory", "resources")
    assert all(word in str(refusal.value) for word in words)


def test_the_field_that_is_too_large_is_named() -> None:
    with pytest.raises(ModelError, match=r"lower engine\.numBlocks, or"):
        check_memory(GIB, GIB, EngineConfig(num_blocks=8), GIB)


def test_each_engine_of_a_worker_takes_its_part_of_the_memory() -> None:
    with pytest.raises(ModelError, match="for each of 2 engines"):
        check_memory(GIB, GIB, EngineConfig(data_parallel_size=2, max_sequences=8), 3 * GIB)


def test_a_cache_above_the_memory_of_this_machine_is_refused_before_it_is_taken() -> None:
    with pytest.raises(ModelError, match="do not fit into the memory of this worker"):
        open_cache(GEOMETRY, EngineConfig(kv_cache_memory=1 << 50), CPU, 100, GIB)


def test_one_block_is_refused() -> None:
    engine = EngineConfig(block_size=GEOMETRY.block_size, num_blocks=1, device_memory_share=0.5)
    with pytest.raises(ModelError, match="leaves 1 KV blocks"):
        device_blocks(GEOMETRY, engine, 1000, total=80 * GIB, taken=0)
