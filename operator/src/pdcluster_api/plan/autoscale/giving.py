"""Choose the pools that give workers up where too many are asked for.

The pool that is farthest above its minReplicas gives first, one worker at a
time; of pools equally far, the one that loses no ready worker by it.  A role
never gives its last worker, nor its last ready one.  The result is the same as
giving one by one, but workers are not counted singly: between two moments at
which a pool begins to count otherwise, all that is given is one sum.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from pdcluster_api.plan.autoscale.pools import Pool, Vector, num_ready_left
from pdcluster_api.schema.workload import PoolKey


def roles_of(pools: Sequence[Pool]) -> Iterable[list[Pool]]:
    """The pools of each role."""
    for role in dict.fromkeys(pool.facts.role for pool in pools):
        yield [pool for pool in pools if pool.facts.role == role]


def given_up(excess: int, among: Sequence[Pool], pools: Sequence[Pool], vector: Vector) -> dict[PoolKey, int]:
    """The vector without `excess` workers, or without as many as these pools may give.

    among: pools that may give; pools: all of the cluster
    """
    left = dict(vector)
    while excess > 0 and (donors := _donors(among, pools, left)):
        caps = _caps(donors, pools, left)
        number = bisect_left(range(1, excess + 1), True, key=lambda more: not _is_within(caps, donors, left, more))
        for key, given in _levelled(donors, left, number).items():
            left[key] -= given
        excess -= number
    return left


def _donors(among: Sequence[Pool], pools: Sequence[Pool], vector: Vector) -> list[Pool]:
    """The pools that give next: all that count alike."""
    able: set[PoolKey] = set()
    for mine in roles_of(pools):
        is_last = sum(vector[pool.key] for pool in mine) <= 1
        is_last_ready = num_ready_left(mine, vector) == 1
        able |= {pool.key for pool in mine if vector[pool.key] and not is_last and not (is_last_ready and _costs_ready(pool, vector))}
    ranks = {pool.key: (vector[pool.key] > pool.low, not _costs_ready(pool, vector)) for pool in among if pool.key in able}
    return [pool for pool in among if pool.key in ranks and ranks[pool.key] == max(ranks.values())]


def _costs_ready(pool: Pool, vector: Vector) -> bool:
    return pool.ready_left(vector[pool.key] - 1) < pool.ready_left(vector[pool.key])


Caps = Sequence[tuple[Sequence[PoolKey], int]]
"""How many workers some pools may give together before any of them counts otherwise."""


def _caps(donors: Sequence[Pool], pools: Sequence[Pool], vector: Vector) -> Caps:
    caps: list[tuple[Sequence[PoolKey], int]] = [((pool.key,), _alike(pool, vector[pool.key])) for pool in donors]
    for mine in roles_of(pools):
        giving = [pool for pool in donors if pool in mine]
        if giving:
            keys = [pool.key for pool in giving]
            caps.append((keys, sum(vector[pool.key] for pool in mine) - 1))
            if _costs_ready(giving[0], vector):  # so it does of all donors
                caps.append((keys, num_ready_left(mine, vector) - 1))
    return caps


def _alike(pool: Pool, size: int) -> int:
    """Workers that a pool of that size may give until it counts otherwise.

    It does at minReplicas, at its highest ready worker, and where none of them is left.
    """
    turns = (pool.low, pool.ready_top, pool.ready_top - pool.facts.ready, 0)
    return size - max(turn for turn in turns if turn < size)


def _is_within(caps: Caps, donors: Sequence[Pool], vector: Vector, number: int) -> bool:
    given = _levelled(donors, vector, number)
    return all(sum(given[key] for key in keys) <= most for keys, most in caps)


def _levelled(donors: Sequence[Pool], vector: Vector, number: int) -> Mapping[PoolKey, int]:
    """Workers that each pool gives of a number, the one farthest above its minReplicas first."""
    above = {pool.key: vector[pool.key] - pool.low for pool in donors}
    top = max(above.values())

    def given(level: int) -> int:
        return sum(max(0, height - level) for height in above.values())

    levels = range(top - number, top + 1)
    level = levels[bisect_left(levels, True, key=lambda each: given(each) <= number)]
    equal = [pool for pool in donors if above[pool.key] >= level]
    equal.sort(key=lambda pool: (pool.low, pool.price, pool.order), reverse=True)
    rest = {pool.key for pool in equal[: number - given(level)]}
    return {key: max(0, height - level) + (key in rest) for key, height in above.items()}
