"""BlockPool: five states, reuse order [V16], and that every step not allowed is an assertion."""

from collections import Counter

import pytest

from pdcluster_worker.engine.block_pool import BlockPool, BlockState
from pdcluster_worker.engine.pool_audit import PoolAuditor


def hashed(pool, count):
    """`count` released blocks with hashes b"0", b"1", ..."""
    blocks = pool.allocate(count)
    for index, block in enumerate(blocks):
        pool.cache(block, str(index).encode())
    pool.release(blocks)
    return blocks


def test_pool_counts_every_block_in_one_state():
    pool = BlockPool(10)
    hashed(pool, 2)
    receiving = pool.allocate(6)[4:]  # four in use beside them, of which none is hashed
    quarantined = pool.allocate(1)
    pool.start_receiving([*receiving, *quarantined])
    pool.quarantine(quarantined)
    assert pool.counts() == {"free": 1, "cached": 2, "in_use": 4, "receiving": 2, "quarantined": 1}
    assert pool.num_available == 3
    pool.check()


def test_pool_reuses_unhashed_blocks_before_cached_ones():
    """[V16]: uncached blocks first."""
    pool = BlockPool(4)
    cached = hashed(pool, 2)
    assert not set(pool.allocate(2)) & set(cached)
    assert len(pool.prefix_cache) == 2


def test_pool_reuses_the_least_recently_released_block_first_and_a_tail_before_its_head():
    """[V16]: LRU; one release is freed in reverse."""
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for index, block in enumerate(blocks):
        pool.cache(block, str(index).encode())
    pool.release(blocks[2:])
    pool.release(blocks[:2])
    assert pool.allocate(4) == [blocks[3], blocks[2], blocks[1], blocks[0]]
    pool.check()


def test_pool_drops_a_hash_only_when_its_block_is_taken_again():
    """[V16]: a released block stays findable until then."""
    pool = BlockPool(2)
    hashed(pool, 2)
    assert len(pool.prefix_cache.match([b"0", b"1"], 2)) == 2
    pool.allocate(1)
    assert pool.prefix_cache.match([b"0"], 1) != []
    assert pool.prefix_cache.match([b"0", b"1"], 2) == pool.prefix_cache.match([b"0"], 1)


def test_pool_keeps_a_block_until_its_last_holder_is_gone():
    pool = BlockPool(2)
    blocks = hashed(pool, 1)
    pool.acquire(blocks)
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.state(blocks[0]) is BlockState.IN_USE
    pool.release(blocks)
    assert pool.state(blocks[0]) is BlockState.CACHED
    assert pool.ref_count(blocks[0]) == 0


def test_pool_refuses_a_double_release():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released while FREE"):
        pool.release(blocks)


def test_pool_refuses_to_release_what_a_peer_may_write():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.start_receiving(blocks)
    with pytest.raises(AssertionError, match="released while RECEIVING"):
        pool.release(blocks)
    pool.quarantine(blocks)
    with pytest.raises(AssertionError, match="released while QUARANTINED"):
        pool.release(blocks)


def test_pool_refuses_shared_and_hashed_blocks_as_transfer_targets():
    pool = BlockPool(3)
    shared, with_hash = pool.allocate(2)
    pool.acquire([shared])
    pool.cache(with_hash, b"h")
    with pytest.raises(AssertionError, match="with 2 holders"):
        pool.start_receiving([shared])
    with pytest.raises(AssertionError, match="with a hash"):
        pool.start_receiving([with_hash])


def test_pool_refuses_to_share_a_free_block_and_to_hand_out_more_than_it_has():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="acquired while FREE"):
        pool.acquire([0])
    with pytest.raises(AssertionError, match="3 blocks asked of 2"):
        pool.allocate(3)


def test_pool_returns_a_quarantined_block_as_free_and_only_once():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.start_receiving(blocks)
    pool.quarantine(blocks)
    assert pool.num_available == 0
    pool.release_quarantined(blocks)
    assert pool.counts()["free"] == 1
    with pytest.raises(AssertionError, match="is FREE, not QUARANTINED"):
        pool.release_quarantined(blocks)


def test_pool_check_finds_a_lost_reference():
    pool = BlockPool(2)
    block = pool.allocate(1)[0]
    pool._ref_counts[block] = 0
    with pytest.raises(AssertionError, match="has no reference"):
        pool.check()


def test_pool_check_finds_a_double_on_the_free_stack():
    pool = BlockPool(3)
    pool._free[0] = pool._free[1]
    with pytest.raises(AssertionError, match="has doubles"):
        pool.check()
    walk = PoolAuditor(pool, Counter, lambda: 0.0)
    with pytest.raises(AssertionError, match="has doubles"):
        walk.turn()


def test_pool_check_finds_a_wrong_sum():
    pool = BlockPool(2)
    pool._counts[BlockState.IN_USE] += 1
    with pytest.raises(AssertionError, match="do not sum to 2"):
        pool.check()
