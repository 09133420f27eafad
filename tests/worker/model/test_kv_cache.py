"""The cache keeps what is written, block by block and byte by byte, in the layout of
docs/kv-blocks.md.
"""

import os
from pathlib import Path

import pytest
import torch

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.kv_cache import KVCache, block_num_bytes, blocks_that_fit
from pdcluster_worker.model.memory import reserve_shared
from pdcluster_worker.model.parallel.rank_layout import ParallelRank

GEOMETRY = KVGeometry(num_kv_heads=3, head_dim=8, num_layers=2, block_size=4, dtype="float32")


def write_tokens(cache, slots, layer):
    """Random keys and values of len(slots) tokens, [Hkv, T, D]."""
    geometry = cache.geometry
    key, value = torch.randn(
        2, geometry.num_kv_heads, len(slots), geometry.head_dim, dtype=cache.tensor.dtype
    ).unbind()
    for place, slot in enumerate(slots):
        block, offset = divmod(slot, geometry.block_size)
        cache.tensor[block, :, layer, 0, offset], cache.tensor[block, :, layer, 1, offset] = (
            key[:, place],
            value[:, place],
        )
    return key, value


def test_tensor_has_the_documented_layout():
    assert KVCache(GEOMETRY, 5).tensor.shape == (5, 3, 2, 2, 4, 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_a_block_make_the_same_block_elsewhere(dtype):
    geometry = KVGeometry(3, 8, 2, 4, dtype)
    source, target = KVCache(geometry, 4), KVCache(geometry, 6)
    key, _ = write_tokens(source, range(8, 12), layer=0)  # block 2
    target.block(5)[:] = source.block(2)
    assert len(source.block(2)) == source.block_bytes == block_num_bytes(geometry)
    assert torch.equal(target.tensor[5], source.tensor[2])
    assert torch.equal(target.tensor[5, :, 0, 0], key)
    assert not target.tensor[:5].any()


def test_block_views_are_writable_and_do_not_reach_their_neighbours():
    cache = KVCache(GEOMETRY, 3)
    cache.block(1)[:] = b"\xff" * cache.block_bytes
    assert not cache.tensor[0].any()
    assert not cache.tensor[2].any()
    assert torch.isnan(cache.tensor[1]).all()


def test_heads_of_a_block_are_one_run_of_its_bytes():
    cache = KVCache(GEOMETRY, 3)
    cache.tensor.normal_()
    assert b"".join(cache.block(1, range(head, head + 1)) for head in range(3)) == cache.block(1)
    cache.staging(2, range(1, 3))[:] = cache.block(1, range(1, 3))
    assert torch.equal(cache.tensor[2, 1:], cache.tensor[1, 1:])
    assert len(cache.block(2, range(1, 3))) == 2 * cache.head_bytes


def test_rank_moves_its_own_heads_of_the_memory_that_all_share():
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


@pytest.mark.parametrize("block_id", [-1, 3])
def test_block_outside_the_cache_is_an_error(block_id):
    with pytest.raises(IndexError, match="there are 3"):
        KVCache(GEOMETRY, 3).block(block_id)


def test_memory_setting_gives_whole_blocks():
    size = block_num_bytes(GEOMETRY)
    assert size == 3 * 2 * 2 * 4 * 8 * 4
    assert blocks_that_fit(GEOMETRY, EngineConfig(block_size=4, kv_cache_memory=7 * size + 5)) == 7


def test_too_little_memory_is_refused_with_the_least_that_works():
    size = block_num_bytes(GEOMETRY)
    with pytest.raises(ModelError, match=rf"raise engine\.kvCacheMemory to {17 * size}$"):
        blocks_that_fit(GEOMETRY, EngineConfig(block_size=4, kv_cache_memory=2 * size - 1))


def test_one_block_is_refused():
    with pytest.raises(ModelError, match=r"leaves 1 KV blocks, .*raise engine\.numBlocks to 17$"):
        blocks_that_fit(GEOMETRY, EngineConfig(block_size=4, num_blocks=1))


def test_more_than_the_machine_can_map_is_refused():
    with pytest.raises(ModelError, match=r"lower engine\.kvCacheMemory"):
        KVCache(GEOMETRY, 1 << 48)


def test_untouched_blocks_cost_no_memory():
    def resident_kib():
        channels = Path("/proc/self/status").read_text().splitlines()
        return next(int(channel.split()[1]) for channel in channels if channel.startswith("VmRSS"))

    before = resident_kib()
    cache = KVCache(GEOMETRY, (1 << 30) // block_num_bytes(GEOMETRY))
    assert cache.num_blocks > 1000
    assert resident_kib() - before < 100_000
