"""The check of an idle pool: no turn grows with the pool, and all of it is seen in the end."""

import pytest

from pdcluster_worker.engine.block_pool import BlockPool
from pdcluster_worker.engine.pool_audit import SLICE_BLOCKS, PoolAuditor


class Looks:
    """Counts what one turn looks at: blocks, states, places on the free stack and holds."""

    def __init__(self, pool, holds=()):
        self.pool, self.holds, self.num = pool, holds, 0
        check_block, count_states, check_free = (
            pool._check_block,
            pool.count_states,
            pool.check_free,
        )
        pool._check_block = lambda *block: (self.add(1), check_block(*block))
        pool.count_states = lambda blocks: (self.add(len(blocks)), count_states(blocks))[1]
        pool.check_free = lambda places, seen: (self.add(len(places)), check_free(places, seen))

    def add(self, num):
        self.num += num

    def holders(self):
        for block in self.holds:
            self.add(1)
            yield block

    def of_a_turn(self, walk):
        self.num = 0
        walk.turn()
        return self.num


def walk_on(walk):
    while walk.is_due:
        walk.turn()


def test_no_turn_over_a_million_blocks_looks_at_more_than_a_slice():
    """A request that comes meanwhile waits for one slice, however many blocks are there or held."""
    pool = BlockPool(1_000_000)
    held = pool.allocate(10 * SLICE_BLOCKS)
    looks = Looks(pool, held)
    walk = PoolAuditor(pool, looks.holders, lambda: 0.0)
    turns = [looks.of_a_turn(walk) for _ in range(15)]
    assert turns[:10] == [SLICE_BLOCKS] * 10  # counting references
    assert turns[10:] == [3 * SLICE_BLOCKS] * 5  # blocks, their states, the free stack

    pool.release(held[-1:])
    looks.holds = held[:-1]
    assert looks.of_a_turn(walk) <= 4 * SLICE_BLOCKS  # begins again, and no turn is larger for that


def test_walk_starts_over_after_a_move_and_ends_with_every_block_seen():
    pool = BlockPool(3 * SLICE_BLOCKS + 5)
    looked = []
    check = pool.check_blocks
    pool.check_blocks = lambda block_ids, held: (looked.extend(block_ids), check(block_ids, held))
    blocks = pool.allocate(7)
    walk = PoolAuditor(pool, lambda: iter(blocks), lambda: 0.0)
    walk.turn()
    pool.release(blocks[3:])
    del blocks[3:], looked[:]
    walk_on(walk)
    assert sorted(looked) == list(range(pool.num_blocks))
    assert looked[0] == SLICE_BLOCKS


@pytest.mark.parametrize("block", [0, 2 * SLICE_BLOCKS])
def test_walk_finds_a_state_that_is_counted_wrong(block):
    """The counts are compared when all blocks have been met: the wrong ones sum to the total."""
    pool = BlockPool(3 * SLICE_BLOCKS)
    held = pool.allocate(2)
    walk = PoolAuditor(pool, lambda: iter(held), lambda: 0.0)
    pool._counts[2], pool._counts[0] = 1, pool.num_blocks - 1
    pool._free.append(block)
    with pytest.raises(AssertionError):
        walk_on(walk)


def test_walk_finds_an_unknown_hold():
    pool = BlockPool(2 * SLICE_BLOCKS)
    pool.allocate(SLICE_BLOCKS + 1)
    walk = PoolAuditor(pool, lambda: iter(range(SLICE_BLOCKS)), lambda: 0.0)
    with pytest.raises(
        AssertionError, match=f"block {SLICE_BLOCKS} has 1 references, 0 holders are known"
    ):
        walk_on(walk)
