"""One declared pool as a decision sees it: what there is of it, its bounds, its price."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pdcluster_api.plan.autoscale.values import Amounts, PoolFacts
from pdcluster_schema.values import MAX_REPLICAS
from pdcluster_schema.workload import PoolKey

ALL = ""
"""The key of all types together, among accelerators by GPU type."""

WORKERS = "workers of all pools together, whatever number of accelerators each has"
"""The key of their number beside those of accelerators: longer than any name of a type."""

Vector = Mapping[PoolKey, int]
"""Replicas by pool"""


def unit_of(limit: str) -> int:
    """The one of `Amounts` that a limit counts."""
    return 0 if limit == WORKERS else 1


@dataclass(frozen=True)
class Pool:
    """One declared pool beside what there is of it.

    order:      its place in the role
    price:      of one accelerator, relative
    weight:     capacity of one worker, relative; see `ratio`
    low, high:  bounds of its replicas now, low at most high
    source:     where the bounds come from, as text
    is_open:    whether it may be asked for more: its GPU type has room as far as is known, and its
                pods can be created
    short:      workers that no node takes for too long
    released: those of them that are asked for no longer
    lost:       workers that are asked for and will not come
    """

    facts: PoolFacts
    order: int
    price: float = 1.0
    weight: float = 1.0
    low: int = 0
    high: int = MAX_REPLICAS
    source: str = "minReplicas and maxReplicas"
    is_open: bool = True
    short: int = 0
    released: int = 0
    lost: int = 0

    @cached_property
    def key(self) -> PoolKey:
        """(role, pool)."""
        return self.facts.key

    @property
    def role(self) -> str:
        """The role that it is of."""
        return self.facts.role

    @property
    def name(self) -> str:
        """`role/pool`, as steps call it."""
        return "/".join(self.key)

    @property
    def size(self) -> int:
        """Workers that are asked for, less those that are given back."""
        return self.facts.replicas - self.released

    @property
    def limits(self) -> frozenset[str]:
        """The keys of the limits that its workers count in."""
        return frozenset((ALL, WORKERS, self.facts.gpu))

    @cached_property
    def one(self) -> Amounts:
        """Amounts of one worker."""
        return Amounts(1, self.facts.gpus_per_replica)

    def requested(self, limit: str, replicas: int) -> int:
        """Amount that so many workers count in a limit."""
        return replicas * self.one[unit_of(limit)]

    def held(self, limit: str, replicas: int) -> int:
        """The most that its pods count in a limit while it moves to that size."""
        return self.facts.held(replicas)[unit_of(limit)]

    def clamp(self, replicas: int) -> int:
        """The nearest size within the bounds."""
        return min(max(replicas, self.low), self.high)

    def bounds_text(self) -> str:
        """The bounds as text: `2 to 8 by schedule night`."""
        return f"{self.low} to {self.high} by {self.source}"

    @cached_property
    def unplaced_above(self) -> int:
        """The size above which no node takes its workers."""
        return self.facts.replicas - self.facts.unschedulable_top

    @cached_property
    def ready_top(self) -> int:
        """The size down to which no ready worker goes: above it none is."""
        return self.facts.replicas - max(self.facts.unready_top, self.facts.unschedulable_top)

    def ready_left(self, replicas: int) -> int:
        """Ready workers that surely stay at that size: the highest ordinals go, ready or not."""
        return max(0, self.facts.ready - max(0, self.ready_top - replicas))

    def loses_ready(self, replicas: int) -> bool:
        """Return whether the pool may lose a ready worker when it gives one of so many up."""
        return self.ready_top - self.facts.ready < replicas <= self.ready_top


def num_ready_left(pools: Iterable[Pool], vector: Vector) -> int:
    """Ready workers that surely stay."""
    return sum(pool.ready_left(vector[pool.key]) for pool in pools)


def by_role(pools: Sequence[Pool]) -> dict[str, list[Pool]]:
    """The pools of each role, in their order."""
    return {
        role: [pool for pool in pools if pool.role == role]
        for role in dict.fromkeys(pool.role for pool in pools)
    }
