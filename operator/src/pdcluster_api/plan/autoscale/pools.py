"""Declared pools as a decision sees them, the budget, and the ratio band: prefill capacity over
decode capacity, in H100s.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pdcluster_api.plan.autoscale.values import Amounts, PoolFacts
from pdcluster_schema.accelerators import Accelerator, Precision, accelerators
from pdcluster_schema.autoscale import BudgetSpec, RatioSpec
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.sections import ENGINELESS, PoolSpec
from pdcluster_schema.stock_rules import precision_of
from pdcluster_schema.values import MAX_REPLICAS, MAX_WORKERS
from pdcluster_schema.workload import PoolKey

ALL = ""  # The key of all types together, among accelerators by GPU type

# The key of their number beside those of accelerators: longer than any name of a type
WORKERS = "workers of all pools together, whatever number of accelerators each has"

Vector = Mapping[PoolKey, int]  # Replicas by pool


def unit_of(limit: str) -> int:
    return 0 if limit == WORKERS else 1


@dataclass(frozen=True)
class Pool:
    facts: PoolFacts
    order: int  # its place in the role
    price: float = 1.0  # of one accelerator, relative
    weight: float = 1.0  # capacity of one worker, relative
    low: int = 0  # bounds of its replicas now, low at most high
    high: int = MAX_REPLICAS
    source: str = "minReplicas and maxReplicas"  # where the bounds come from, as text
    # whether it may be asked for more: its GPU type has room as far as is known, and its pods can
    # be created
    is_open: bool = True
    short: int = 0  # workers that no node takes for too long
    released: int = 0  # those of them that are asked for no longer
    lost: int = 0  # workers that are asked for and will not come

    @cached_property
    def key(self) -> PoolKey:
        return self.facts.key

    @property
    def role(self) -> str:
        return self.facts.role

    @property
    def name(self) -> str:
        return "/".join(self.key)

    @property
    def size(self) -> int:
        """Workers that are asked for, less those that are given back."""
        return self.facts.replicas - self.released

    @property
    def limits(self) -> frozenset[str]:
        return frozenset((ALL, WORKERS, self.facts.gpu))

    @cached_property
    def one(self) -> Amounts:
        return Amounts(1, self.facts.gpus_per_replica)

    def requested(self, limit: str, replicas: int) -> int:
        return replicas * self.one[unit_of(limit)]

    def held(self, limit: str, replicas: int) -> int:
        """The most that its pods count in a limit while it moves to that size."""
        return self.facts.held(replicas)[unit_of(limit)]

    def clamp(self, replicas: int) -> int:
        return min(max(replicas, self.low), self.high)

    def bounds_text(self) -> str:
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
    return sum(pool.ready_left(vector[pool.key]) for pool in pools)


def by_role(pools: Sequence[Pool]) -> dict[str, list[Pool]]:
    return {
        role: [pool for pool in pools if pool.role == role]
        for role in dict.fromkeys(pool.role for pool in pools)
    }


@dataclass(frozen=True)
class Budget:
    """Limits of accelerators by GPU type, in all, and of workers; without any, all fits."""

    limits: dict[str, int] = field(default_factory=dict)
    # what pools hold that no decision sizes: undeclared ones, and routers
    others: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(
        cls, spec: BudgetSpec, undeclared: Iterable[PoolFacts], pools: Iterable[Pool]
    ) -> "Budget":
        """Limits of the spec, and MAX_WORKERS where its pools allow more together."""
        limits = dict(spec.per_gpu)
        if spec.total is not None:
            limits[ALL] = spec.total
        if sum(pool.high for pool in pools) > MAX_WORKERS:
            limits[WORKERS] = MAX_WORKERS
        others = Counter[str]()
        for facts in undeclared:
            others[WORKERS] += facts.current
            if facts.role in ENGINELESS:  # it computes nothing
                continue
            # a type that is not known any more counts in all alone
            for gpu in {ALL, facts.gpu}:
                others[gpu] += facts.current * facts.gpus_per_replica
        return cls(limits, others)

    def limits_of(self, pool: Pool) -> list[str]:
        return [limit for limit in self.limits if limit in pool.limits]

    def requested(self, pools: Sequence[Pool], vector: Vector) -> Counter[str]:
        """Amounts at a vector, by limit: without workers whose places are kept by lost pods."""
        own = {pool.key: max(0, vector[pool.key] - pool.facts.lost) for pool in pools}
        return self._with_others(pools, own)

    def _with_others(self, pools: Iterable[Pool], vector: Vector) -> Counter[str]:
        sums = Counter(self.others)
        for pool in pools:
            for limit in pool.limits:
                sums[limit] += pool.requested(limit, vector[pool.key])
        return sums

    def held(self, pools: Iterable[Pool], vector: Vector) -> Counter[str]:
        """Amounts that may be held at some time on the way to a vector, by limit."""
        sums = Counter(self.others)
        for pool in pools:
            for limit in pool.limits:
                sums[limit] += pool.held(limit, vector[pool.key])
        return sums

    def available(self, pools: Sequence[Pool], vector: Vector) -> dict[str, tuple[int, int]]:
        """Amounts that may still be asked for, and held, by limit; 0 where it is exceeded."""
        requested, held = self.requested(pools, vector), self.held(pools, vector)
        return {
            gpu: (max(0, limit - requested[gpu]), max(0, limit - held[gpu]))
            for gpu, limit in self.limits.items()
        }

    def keeping(self, pools: Iterable[Pool], raised: Vector, vector: Vector) -> "Budget":
        """The budget less the room that pending raises wait for, so that no other pool takes it."""
        missing = {pool.key: raised[pool.key] - vector[pool.key] for pool in pools}
        return Budget(self.limits, self._with_others(pools, missing))

    def over(self, pools: Sequence[Pool], vector: Vector) -> str | None:
        """Limits that are exceeded, as text; None = none is."""
        requested = self.requested(pools, vector)
        found = [
            f"{gpu or 'in all'}: {requested[gpu]} of {limit}"
            for gpu, limit in self.limits.items()
            if requested[gpu] > limit
        ]
        return ", ".join(found) or None

    def used(self, pools: Sequence[Pool], vector: Vector) -> str:
        """As text: `7 of 8 accelerators ..., 1 by pods that end`."""
        held = self.held(pools, vector)
        ending = sum(pool.requested(ALL, pool.facts.ending) for pool in pools)
        limits = ", ".join(
            f"{held[gpu]} of {limit} {gpu or 'accelerators'}"
            for gpu, limit in sorted(self.limits.items())
        )
        is_roll_out = any(len(pool.facts.holdings) > 1 for pool in pools)
        whose = "pods that end or are of another revision" if is_roll_out else "pods that end"
        return f"{limits} are held or asked for" + (f", {ending} by {whose}" if ending else "")


_UNIT = "H100"
_DUST = 1e-9
_MOST_OFF = 2.0
_FAR = 1e6  # more than the logarithm of any factor

# Workers that a band adds to a role at most, twice those of a whole cell: a band that asks for more
# is met in several decisions
MOST_ADDED = 256

# Workers above what a band asks for: a narrow band may be met only by somewhat greater sizes
ROUNDING_MARGIN = 8


def table_weight(role: str, accelerator: Accelerator, precision: Precision = "bf16") -> float:
    """Capacity of one accelerator for a role, in H100s.  precision: in which it computes prompts

    >>> known = accelerators()
    >>> table_weight("prefill", known["B200"]), table_weight("prefill", known["B200"], "fp4")
    (2.2750253, 9.1001011)
    >>> [table_weight("decode", known[gpu]) for gpu in ("H200", "B200", "B300")]
    [1.4328358, 2.25, 2.3880597]
    """
    unit = accelerators()[_UNIT]
    if role == "prefill":
        return _over(_flops(accelerator, precision), _flops(unit, precision)) or 1.0
    streams = _over(accelerator.bandwidth_bytes, unit.bandwidth_bytes)
    memory = _over(accelerator.memory_bytes, unit.memory_bytes)
    return min(streams, memory) if streams and memory else streams or 1.0


def _flops(accelerator: Accelerator, precision: Precision) -> int | None:
    units = {"bf16": None, "fp8": accelerator.fp8_flops, "fp4": accelerator.fp4_flops}
    return units[precision] or accelerator.bf16_flops


def _over(number: int | None, of_unit: int | None) -> float | None:
    return None if number is None or of_unit is None else round(number / of_unit, 7)


def worker_weight(spec: PDClusterSpec, role: str, pool: PoolSpec) -> float:
    of_one = table_weight(role, spec.hardware(pool.gpu), precision_of(spec.engine_of(role)))
    return of_one * spec.gpus_per_replica(role, pool)


def flexible_pair(spec: PDClusterSpec) -> tuple[PoolKey, PoolKey] | None:
    """Keys of the flexible pools of prefill and of decode; None = there are none."""
    declared = spec.roles.computing()
    found = {role: pool for role in declared for pool in declared[role].pools if pool.flexible}
    if not found:
        return None
    return ("prefill", found["prefill"].name), ("decode", found["decode"].name)


def relative_price(spec: PDClusterSpec, gpu: str) -> float:
    """Price of one accelerator, by `autoscale.cost`; where that names no type, and the types of all
    pools have one, by pricePerHour.
    """
    cost = spec.autoscale.cost
    gpus = {pool.gpu for role in spec.roles.computing().values() for pool in role.pools}
    prices = {each: spec.price_per_hour(each) for each in gpus}
    return cost.get(gpu, 1.0) if cost or None in prices.values() else prices[gpu] or 1.0


def measured_weights(
    table: Sequence[float], speeds: Sequence[float | None], tolerance: float
) -> list[float]:
    """Weights of a role's pools by measured tokens per second per busy worker.

    The first pool keeps the weight of the table.  A weight within the tolerance of the
    table's is left as it is, and so are all while one speed is unknown.  A speed more than
    `_MOST_OFF` times off the table's is taken as unknown: one odd pool must not move the band.

    >>> measured_weights([1.0, 2.0], [100.0, 300.0], 0.1)
    [1.0, 3.0]
    """
    if len(table) < 2 or any(not speed for speed in speeds):
        return list(table)
    unit = table[0] / (speeds[0] or 1.0)
    found = [
        max(old / _MOST_OFF, min(old * _MOST_OFF, (speed or 0.0) * unit))
        for old, speed in zip(table, speeds, strict=True)
    ]
    return [
        old if abs(new - old) <= tolerance * old else float(f"{new:.2g}")
        for old, new in zip(table, found, strict=True)
    ]


def capacity(role: str, pools: Iterable[Pool], vector: Vector) -> float:
    return sum(pool.weight * vector[pool.key] for pool in pools if pool.role == role)


@dataclass(frozen=True)
class Band:
    """Least and greatest prefill capacity over decode capacity; 0 and infinity = no bound."""

    least: float = 0.0
    greatest: float = math.inf

    @classmethod
    def of(cls, spec: RatioSpec) -> "Band":
        return cls(spec.min or 0.0, math.inf if spec.max is None else spec.max)

    def distance(self, prefill: float, decode: float) -> float:
        """Logarithm of the factor by which two capacities miss the band; 0 = inside."""
        if prefill <= 0.0 and decode <= 0.0:
            return 0.0
        if prefill < decode * self.least * (1.0 - _DUST):
            return math.inf if prefill <= 0.0 else math.log(decode * self.least / prefill)
        if prefill > decode * self.greatest * (1.0 + _DUST):
            # Without any decode worker each prefill worker is one too many.
            return _FAR + prefill if decode <= 0.0 else math.log(prefill / (decode * self.greatest))
        return 0.0

    def short(self, prefill: float, decode: float) -> str | None:
        """The role that has too few workers; None = neither."""
        if self.distance(prefill, decode) == 0.0:
            return None
        return "prefill" if prefill < decode * self.least else "decode"

    def reach(self, role: str, recommended: int, other: float, lightest: float) -> int:
        """The size up to which a role follows the other: surely enough for the band.  other:
        capacity of the other role; lightest: of one worker of this one
        """
        factor = self.least if role == "prefill" else 1.0 / self.greatest
        requested = math.ceil(min(other * factor / lightest, 1e9))
        return min(max(recommended, requested) + ROUNDING_MARGIN, recommended + MOST_ADDED)

    def __str__(self) -> str:
        greatest = "any" if math.isinf(self.greatest) else f"{self.greatest:.3g}"
        return f"{self.least:.3g} to {greatest}"


def ratio_text(pools: Sequence[Pool], vector: Vector) -> str:
    prefill, decode = (capacity(role, pools, vector) for role in ("prefill", "decode"))
    text = f"prefill {prefill:.3g} over decode {decode:.3g}"
    return text + (f" is {prefill / decode:.3g}" if decode else "")
