"""BlockPool: every step that is not allowed, and every broken structure, is an assertion.

What is allowed is beside a model in test_block_pool_machine.
"""

from collections import Counter
from collections.abc import Callable

import pytest

from pdcluster_worker.engine.block_pool import BlockPool, BlockState
from pdcluster_worker.engine.pool_audit import PoolAuditor


def pool_with(*actions: str) -> BlockPool:
    """A pool of three blocks, whose block 0 was taken and went through these."""
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    for action in actions:
        if action == "cache":
            pool.cache(block, b"h")
        else:
            getattr(pool, action)([block])
    return pool


@pytest.mark.parametrize(
    ("before", "action", "message"),
    [
        (["release"], "release", "released while FREE"),
        (["release"], "acquire", "acquired while FREE"),
        (["start_receiving"], "release", "released while RECEIVING"),
        (["start_receiving", "quarantine"], "release", "released while QUARANTINED"),
        (["acquire"], "start_receiving", "with 2 holders"),
        (["cache"], "start_receiving", "with a hash"),
        (
            ["start_receiving", "quarantine", "release_quarantined"],
            "release_quarantined",
            "is FREE, not QUARANTINED",
        ),
    ],
)
def test_pool_refuses_what_a_state_does_not_allow(
    before: list[str], action: str, message: str
) -> None:
    pool = pool_with(*before)
    with pytest.raises(AssertionError, match=message):
        getattr(pool, action)([0])


def test_pool_refuses_to_hand_out_more_than_it_has_and_to_hash_a_block_twice() -> None:
    pool = pool_with("cache")
    with pytest.raises(AssertionError, match="3 blocks asked of 2"):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="hashed twice"):
        pool.cache(0, b"other")


def lose_a_reference(pool: BlockPool) -> None:
    pool._ref_counts[0] = 0


def double_a_free_block(pool: BlockPool) -> None:
    pool._free[0] = pool._free[1]


def miscount(pool: BlockPool) -> None:
    pool._counts[BlockState.IN_USE] += 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_reference, "has no reference"),
        (double_a_free_block, "has doubles"),
        (miscount, "do not sum to 3"),
    ],
)
def test_checks_of_the_pool_and_of_its_auditor_find_damage(
    damage: Callable[[BlockPool], None], message: str
) -> None:
    pool = pool_with()
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()
    with pytest.raises(AssertionError, match=message):
        PoolAuditor(pool, lambda: iter(Counter({0: 1})), lambda: 0.0).turn()
