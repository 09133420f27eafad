"""The cache of ranks on devices of their own: here on the CPU, with the same copies."""

import doctest

import pytest
import torch

from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model import rank_layout as place_module
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.parallel.device_parts import RanksDeviceCache, rank_cache
from pdcluster_worker.model.rank_layout import ParallelRank

GEOMETRY = KVGeometry(num_kv_heads=4, head_dim=8, num_layers=3, block_size=4, dtype="bfloat16")
CPU = torch.device("cpu")


def cache_of(tensor: int, pipeline: int, num_blocks: int = 4) -> RanksDeviceCache:
    places = [ParallelRank(tensor, pipeline, rank) for rank in range(tensor * pipeline)]
    parts = [(place, rank_cache(GEOMETRY, num_blocks, place, CPU).tensor) for place in places]
    return RanksDeviceCache(GEOMETRY, num_blocks, parts)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 2)])
def test_a_block_of_one_rank_lands_in_parts_and_comes_back_the_same(
    tensor: int, pipeline: int
) -> None:
    host = KVCache(GEOMETRY, 4)
    host.tensor.normal_()
    cache = cache_of(tensor, pipeline)
    assert cache.block_bytes == host.block_bytes

    staging = cache.staging(3)
    staging[:] = host.block(1)
    cache.write_block(3, staging)

    assert cache.block(3) == host.block(1)
    assert not any(any(cache.block(block)) for block in range(3))
    for place, part in cache._parts:
        assert torch.equal(part[3], host.part(place)[1])


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (4, 1), (2, 2)])
def test_some_heads_leave_and_land_alone(tensor: int, pipeline: int) -> None:
    host, cache, heads = KVCache(GEOMETRY, 4), cache_of(tensor, pipeline), range(1, 3)
    host.tensor.normal_()

    staging = cache.staging(3, heads)
    staging[:] = host.block(1, heads)
    cache.write_block(3, staging, heads)

    assert cache.block(3, heads) == host.block(1, heads)
    assert not any(cache.block(3, range(1)))
    assert not any(cache.block(3, range(3, 4)))


@pytest.mark.parametrize(("rank", "heads"), [(0, range(2)), (1, range(2, 4))])
def test_a_rank_on_its_own_device_has_its_heads(rank: int, heads: range) -> None:
    cache = rank_cache(GEOMETRY, 4, ParallelRank(tensor_size=2, rank=rank), CPU)

    assert cache.heads == heads
    assert cache.tensor.shape == (4, 2, 3, 2, 4, 8)
    assert cache.head_bytes == KVCache(GEOMETRY, 4).head_bytes


def test_documented_examples_of_a_place_hold() -> None:
    assert doctest.testmod(place_module).failed == 0


@pytest.mark.parametrize("block_id", [-1, 4])
def test_a_block_outside_the_cache_is_an_error(block_id: int) -> None:
    with pytest.raises(IndexError, match="there are 4"):
        cache_of(2, 1).block(block_id)
