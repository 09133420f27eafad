"""The sizes that a decision begins from: within bounds and budget, whatever the load is. An
exceeded budget takes workers away at once, below minReplicas too, but never a role's last ready
worker.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.allocate import Allocation
from pdcluster_api.plan.autoscale.pools import Budget, Pool, Vector, by_role, num_ready_left
from pdcluster_api.plan.autoscale.values import DecisionTrace
from pdcluster_api.plan.observed.state import Problem
from pdcluster_schema import conditions
from pdcluster_schema.workload import PoolKey


def trim(excess: int, limit: str, pools: Sequence[Pool], vector: Vector) -> dict[PoolKey, int]:
    """The vector with at least so much less in a limit, or as much as its pools may give.  excess:
    as the limit counts; pools: all of the cluster
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
    above = size - pool.low
    return above <= 0, pool.loses_ready(size), -above, -size, -pool.price, -pool.order


def base_of(pools: Sequence[Pool], budget: Budget, trace: DecisionTrace) -> tuple[Vector, Budget]:
    """The sizes, and the budget less the room that a raised minReplicas waits for."""
    bounded = {pool.key: pool.clamp(pool.size) for pool in pools}
    for pool in pools:
        trace.step(rules.BOUNDS, pool.name, (pool.size, bounded[pool.key]), pool.bounds_text())
    raised = _within(budget, pools, bounded)
    base = _within_budget(budget, pools, raised)
    usage = budget.over(pools, bounded) or budget.used(pools, base)
    for pool in pools:
        _note(trace, pool, (bounded[pool.key], base[pool.key]), usage)
    trace.problems += _problems(budget, pools, base)
    return base, budget.keeping(pools, raised, base)


def _within(budget: Budget, pools: Sequence[Pool], bounded: Vector) -> dict[PoolKey, int]:
    vector = dict(bounded)
    # All together last: what a type forbids takes no room there.
    for gpu, limit in sorted(budget.limits.items(), reverse=True):
        excess = budget.requested(pools, vector)[gpu] - limit
        vector = trim(excess, gpu, pools, vector)
    for mine in by_role(pools).values():
        last = max(mine, key=lambda pool: (pool.facts.ready, -pool.price, -pool.order))
        if last.facts.ready and not num_ready_left(mine, vector):
            vector[last.key] = last.ready_top - last.facts.ready + 1
    return vector


def _within_budget(budget: Budget, pools: Sequence[Pool], raised: Vector) -> dict[PoolKey, int]:
    """The sizes as far as what is raised has room; a role keeps one worker until then."""
    now = {pool.key: pool.size for pool in pools}
    allocation = Allocation(pools, now, budget)
    falling = [pool for pool in pools if raised[pool.key] <= pool.size]
    rising = [pool for pool in pools if raised[pool.key] > pool.size]
    for pool in (*falling, *reversed(rising)):
        allocation.move_to(pool, raised[pool.key])
    vector = allocation.sizes
    for mine in by_role(pools).values():
        last = max(mine, key=lambda pool: pool.size)
        if last.size and not any(vector[pool.key] for pool in mine):
            vector[last.key] = 1  # until the one that is to take its place has room
    return vector


def _note(trace: DecisionTrace, pool: Pool, sizes: tuple[int, int], usage: str) -> None:
    before, after = sizes
    if after > before:
        why = "no other worker of the role is ready: it waits until another is ready"
        trace.step(rules.NEVER_ALONE, pool.name, sizes, why)
    elif after < pool.size:
        trace.step(rules.BUDGET, pool.name, sizes, f"the budget is exceeded ({usage})")
    else:
        trace.step(rules.BUDGET, pool.name, sizes, f"it waits for room: {usage}")


def _problems(budget: Budget, pools: Sequence[Pool], vector: Vector) -> list[Problem]:
    over = budget.over(pools, vector)
    if over is not None:
        workers = (sum(vector[pool.key] for pool in mine) for mine in by_role(pools).values())
        why = (
            "one worker of each role is more than"
            if all(number <= 1 for number in workers)
            else "the last ready worker of a role waits until another is ready, over"
        )
        message = f"{why} the budget ({over}): raise autoscale.budget"
        return [Problem(conditions.BUDGET_TOO_SMALL, message)]
    short = [
        f"{pool.name} has {vector[pool.key]} of minReplicas {pool.low}"
        for pool in pools
        if vector[pool.key] < pool.low
    ]
    if short:
        message = f"{', '.join(short)}: raise autoscale.budget or lower minReplicas"
        return [Problem(conditions.BUDGET_TOO_SMALL, message)]
    return []
