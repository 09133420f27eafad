"""Choose the pool of a role that grows or shrinks: the sizes a role passes, one worker at a time.

Sizes are counted, never walked through: the cost of a decision follows from the
number of pools and not from the number of workers asked for.

A role grows in the cheapest pool that has capacity and shrinks in the dearest;
of equal prices the pool that stands first in the spec is the cheaper.  A pool
with pods that no node takes shrinks before all others: that costs nothing.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pdcluster_api.plan.autoscale.values import PoolFacts
from pdcluster_api.schema.values import MAX_REPLICAS
from pdcluster_api.schema.workload import PoolKey

ALL = ""
"""The key of all types together, among accelerators by GPU type."""

Vector = Mapping[PoolKey, int]
"""Replicas by pool"""

Stretch = tuple[PoolKey, int]
"""So many workers of one pool, one after the other."""


@dataclass(frozen=True)
class Pool:
    """One declared pool beside what there is of it.

    order:     its place in the role
    price:     of one worker, relative
    weight:    capacity of one worker, relative; see `ratio`
    low, high: bounds of its replicas now, low at most high
    source:    where the bounds come from, as text
    is_open:   whether it may be asked for more: its GPU type has room as far as is known, and its
               pods can be created
    """

    facts: PoolFacts
    order: int
    price: float = 1.0
    weight: float = 1.0
    low: int = 0
    high: int = MAX_REPLICAS
    source: str = "minReplicas and maxReplicas"
    is_open: bool = True

    @property
    def key(self) -> PoolKey:
        """(role, pool)."""
        return self.facts.key

    @property
    def name(self) -> str:
        """`role/pool`, as steps call it."""
        return "/".join(self.key)

    def clamp(self, replicas: int) -> int:
        """The nearest size within the bounds."""
        return min(max(replicas, self.low), self.high)

    def bounds_said(self) -> str:
        """The bounds as text: `2 to 8 by schedule night`."""
        return f"{self.low} to {self.high} by {self.source}"

    def held(self, replicas: int) -> int:
        """Accelerators that the pool may hold while it moves to that size."""
        return self.facts.held(replicas)

    @property
    def ready_top(self) -> int:
        """The size down to which no ready worker goes: above it none is."""
        return self.facts.replicas - max(self.facts.unready_top, self.facts.unschedulable_top)

    def ready_left(self, replicas: int) -> int:
        """Ready workers that surely stay at that size: the highest ordinals go, ready or not."""
        return max(0, self.facts.ready - max(0, self.ready_top - replicas))


def num_ready_left(pools: Iterable[Pool], vector: Vector) -> int:
    """Ready workers that surely stay."""
    return sum(pool.ready_left(vector[pool.key]) for pool in pools)


@dataclass(frozen=True)
class Trail:
    """The vectors of a role for each of its sizes from `first` to `last`.

    base:           where it begins, by pool
    shrinks, grows: how it goes on from there, down and up
    """

    pools: Sequence[Pool]
    base: Vector
    shrinks: Sequence[Stretch]
    grows: Sequence[Stretch]

    @cached_property
    def first(self) -> int:
        """The smallest size."""
        return self._here - sum(number for _, number in self.shrinks)

    @cached_property
    def last(self) -> int:
        """The greatest size."""
        return self._here + sum(number for _, number in self.grows)

    @cached_property
    def _here(self) -> int:
        return sum(self.base.values())

    def at(self, size: int) -> Vector:
        """Replicas by pool at a size within the trail."""
        vector, left = dict(self.base), abs(size - self._here)
        sign, stretches = (1, self.grows) if size > self._here else (-1, self.shrinks)
        for key, number in stretches:
            vector[key] += sign * min(number, left)
            left -= min(number, left)
        return vector

    def clip(self, size: int) -> int:
        """The nearest size of the trail."""
        return min(max(size, self.first), self.last)


def trail(pools: Sequence[Pool], base: Vector, room: Mapping[str, int], *, down_to: int, up_to: int) -> Trail:
    """The sizes of a role around `base`, as far as its pools can follow.

    room: accelerators by GPU type, and in all, that may still be asked for; what is absent has no
          limit
    """
    here = {pool.key: base[pool.key] for pool in pools}
    return Trail(pools, here, _shrinking(pools, here, down_to), _growing(pools, here, room, up_to))


def _shrinking(pools: Sequence[Pool], base: Vector, down_to: int) -> list[Stretch]:
    left = dict(base)
    surplus = sum(base.values()) - down_to
    found: list[Stretch] = []
    for pool, limit in _donors(pools):
        number = min(surplus, left[pool.key] - max(pool.low, limit))
        if number > 0:
            found.append((pool.key, number))
            left[pool.key] -= number
            surplus -= number
    return found


def _donors(pools: Sequence[Pool]) -> Iterable[tuple[Pool, int]]:
    """(pool, size to which it shrinks) in order: first workers that no node took."""
    dearest = sorted(pools, key=lambda pool: (pool.price, pool.order), reverse=True)
    yield from ((pool, pool.facts.replicas - pool.facts.unschedulable_top) for pool in dearest)
    yield from ((pool, 0) for pool in dearest)


def _growing(pools: Sequence[Pool], base: Vector, room: Mapping[str, int], up_to: int) -> list[Stretch]:
    lack = up_to - sum(base.values())
    left = dict(room)
    found: list[Stretch] = []
    for pool in sorted(pools, key=lambda pool: (pool.price, pool.order)):
        here, limits = base[pool.key], {ALL, pool.facts.gpu} & left.keys()
        number = _growth(pool, here, lack, min((left[key] for key in limits), default=None))
        if number > 0:
            found.append((pool.key, number))
            lack -= number
            for key in limits:
                left[key] -= pool.held(here + number) - pool.held(here)
    return found


def _growth(pool: Pool, replicas: int, lack: int, free: int | None) -> int:
    """Workers that a pool can take of the lacking ones.

    free: accelerators that it may ask for; None = no limit
    """
    if not pool.is_open or replicas + 1 < pool.low:
        return 0
    most = min(lack, pool.high - replicas)
    if free is None:
        return most
    held = pool.held(replicas)
    return bisect_right(range(1, most + 1), free, key=lambda more: pool.held(replicas + more) - held)
