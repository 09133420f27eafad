"""Which pool of a role grows and which shrinks: the sizes that a role passes through, one worker at a time.

A role grows in the cheapest pool that has capacity and shrinks in the dearest;
of equal prices the pool that stands first in the spec is the cheaper.  A pool
with pods that no node takes shrinks before all others, for that costs nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdcluster_operator.plan.autoscale.values import PoolFacts, PoolKey

Vector = Mapping[PoolKey, int]
"""Replicas by pool"""


@dataclass(frozen=True)
class Pool:
    """One declared pool beside what there is of it.

    order:     its place in the role
    gpus:      accelerators of one worker
    price:     of one worker, relative
    weight:    capacity of one worker, relative; see `ratio`
    low, high: bounds of its replicas now, low at most high; high None = no bound
    source:    where the bounds come from, for a person
    is_open:   whether it may be asked for more: its GPU type has room as far as is known, and its pods can be created
    """

    facts: PoolFacts
    order: int
    gpus: int = 1
    price: float = 1.0
    weight: float = 1.0
    low: int = 0
    high: int | None = None
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
        replicas = max(replicas, self.low)
        return replicas if self.high is None else min(replicas, self.high)

    def bounds_said(self) -> str:
        """`2 to 8 by schedule night`, for a person."""
        return f"{self.low} to {'any' if self.high is None else self.high} by {self.source}"

    def held(self, replicas: int) -> int:
        """Accelerators that the pool may hold while it moves to that size."""
        return self.gpus * self.facts.held(replicas)

    def ready_left(self, replicas: int) -> int:
        """How many of its ready workers surely stay at that size: the highest ordinals go, whichever of the others are ready."""
        tops = max(self.facts.unready_top, self.facts.unschedulable_top)
        return max(0, self.facts.ready - max(0, self.facts.replicas - tops - replicas))


def num_ready_left(pools: Iterable[Pool], vector: Vector) -> int:
    """Ready workers that surely stay."""
    return sum(pool.ready_left(vector[pool.key]) for pool in pools)


@dataclass(frozen=True)
class Trail:
    """The vectors of a role for each of its sizes from `first` on."""

    pools: Sequence[Pool]
    first: int
    vectors: Sequence[Vector]

    @property
    def last(self) -> int:
        """The greatest size."""
        return self.first + len(self.vectors) - 1

    def at(self, size: int) -> Vector:
        """Replicas by pool at a size within the trail."""
        return self.vectors[size - self.first]

    def clip(self, size: int) -> int:
        """The nearest size of the trail."""
        return min(max(size, self.first), self.last)


def trail(pools: Sequence[Pool], base: Vector, room: Mapping[str, int], *, down_to: int, up_to: int) -> Trail:
    """The sizes of a role around `base`, as far as its pools can follow.

    room: accelerators by GPU type that may still be asked for; a type that is not in it has no limit
    """
    shrinking = _shrinking(pools, base, down_to)
    growing = _growing(pools, base, room, up_to)
    here = {pool.key: base[pool.key] for pool in pools}
    size = sum(here.values())
    return Trail(pools, size - len(shrinking), [*reversed(shrinking), here, *growing])


def _shrinking(pools: Sequence[Pool], base: Vector, down_to: int) -> list[Vector]:
    vector = {pool.key: base[pool.key] for pool in pools}
    surplus = sum(vector.values()) - down_to
    vectors: list[Vector] = []
    for pool, limit in _donors(pools):
        while len(vectors) < surplus and vector[pool.key] > max(pool.low, limit):
            vector = {**vector, pool.key: vector[pool.key] - 1}
            vectors.append(vector)
    return vectors


def _donors(pools: Sequence[Pool]) -> Iterable[tuple[Pool, int]]:
    """(pool, the size to which it shrinks) in the order in which workers are taken away: first those that no node took."""
    dearest = sorted(pools, key=lambda pool: (pool.price, pool.order), reverse=True)
    yield from ((pool, pool.facts.replicas - pool.facts.unschedulable_top) for pool in dearest)
    yield from ((pool, 0) for pool in dearest)


def _growing(pools: Sequence[Pool], base: Vector, room: Mapping[str, int], up_to: int) -> list[Vector]:
    vector = {pool.key: base[pool.key] for pool in pools}
    lack = up_to - sum(vector.values())
    left = dict(room)
    vectors: list[Vector] = []
    for pool in sorted(pools, key=lambda pool: (pool.price, pool.order)):
        while len(vectors) < lack and _may_grow(pool, vector[pool.key], left):
            replicas = vector[pool.key]
            if pool.facts.gpu in left:
                left[pool.facts.gpu] -= pool.held(replicas + 1) - pool.held(replicas)
            vector = {**vector, pool.key: replicas + 1}
            vectors.append(vector)
    return vectors


def _may_grow(pool: Pool, replicas: int, left: Mapping[str, int]) -> bool:
    if not pool.is_open or pool.clamp(replicas + 1) != replicas + 1:
        return False
    more = pool.held(replicas + 1) - pool.held(replicas)
    return more == 0 or more <= left.get(pool.facts.gpu, more)
