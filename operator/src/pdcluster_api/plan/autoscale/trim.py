"""Choose the pools that give workers up where too many are asked for.

The pool that is farthest above its minReplicas gives first, one worker at a
time; of pools equally far, the one that loses no ready worker by it.  A role
never gives its last worker, nor its last ready one.  Where a worker of many
accelerators gave more than was needed, smaller ones that gave before it stay.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from pdcluster_api.plan.autoscale.pools import Pool, Vector, by_role, num_ready_left
from pdcluster_schema.workload import PoolKey


def trim(excess: int, limit: str, pools: Sequence[Pool], vector: Vector) -> dict[PoolKey, int]:
    """The vector with at least so much less in a limit, or as much as its pools may give.

    excess: as the limit counts; pools: all of the cluster
    """
    among = [pool for pool in pools if limit in pool.limits]
    left, roles = dict(vector), by_role(pools)
    workers = {role: sum(left[pool.key] for pool in mine) for role, mine in roles.items()}
    ready = {role: num_ready_left(mine, left) for role, mine in roles.items()}
    donors = [(_rank(pool, left[pool.key]), number) for number, pool in enumerate(among)]
    heapify(donors)
    given: list[Pool] = []
    while excess > 0 and donors:
        _, number = donors[0]
        pool = among[number]
        size, role = left[pool.key], pool.role
        loses_ready = pool.loses_ready(size)
        if not size or workers[role] <= 1 or (loses_ready and ready[role] == 1):
            heappop(donors)  # nor will it give later: what its role has only becomes less
            continue
        left[pool.key] -= 1
        given.append(pool)
        workers[role] -= 1
        ready[role] -= loses_ready
        excess -= pool.requested(limit, 1)
        heapreplace(donors, (_rank(pool, size - 1), number))
    for pool in reversed(given):
        if (amount := pool.requested(limit, 1)) <= -excess:
            left[pool.key] += 1
            excess += amount
    return left


def _rank(pool: Pool, size: int) -> tuple[float, ...]:
    """The least gives first; of pools that are alike the dearest."""
    above = size - pool.low
    return above <= 0, pool.loses_ready(size), -above, -size, -pool.price, -pool.order
