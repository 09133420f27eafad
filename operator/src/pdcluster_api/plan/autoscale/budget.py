"""The budget of accelerators, in all and by type.

Each worker counts with all its accelerators, one without any as one, as long as a
pod may hold them: what runs, what ends, and what is asked for.  So growth waits until
the pods that make room for it are gone, and a decision keeps to the budget in
whatever order it is carried out.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdcluster_api.plan.autoscale.pools import ALL, WORKERS, Pool, Vector
from pdcluster_api.plan.autoscale.values import PoolFacts
from pdcluster_schema.autoscale import BudgetSpec
from pdcluster_schema.sections import ROUTER
from pdcluster_schema.values import MAX_WORKERS


@dataclass(frozen=True)
class Budget:
    """Limits of accelerators by GPU type, in all and of workers under their own keys; without any,
    all fits.

    others: what pools hold that no decision sizes: undeclared ones, and routers
    """

    limits: dict[str, int] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(
        cls, spec: BudgetSpec, undeclared: Iterable[PoolFacts], pools: Iterable[Pool]
    ) -> "Budget":
        """Limits of the spec, and the most one object may have where its pools allow more
        together.
        """
        limits = dict(spec.per_gpu)
        if spec.total is not None:
            limits[ALL] = spec.total
        if sum(pool.high for pool in pools) > MAX_WORKERS:
            limits[WORKERS] = MAX_WORKERS
        others = Counter[str]()
        for facts in undeclared:
            others[WORKERS] += facts.current
            if facts.role == ROUTER:  # it computes nothing
                continue
            # a type that is not known any more counts in all alone
            for gpu in {ALL, facts.gpu}:
                others[gpu] += facts.current * facts.gpus_per_replica
        return cls(limits, others)

    def limits_of(self, pool: Pool) -> list[str]:
        """The limits that workers of a pool count in."""
        return [limit for limit in self.limits if limit in pool.limits]

    def requested(self, pools: Iterable[Pool], vector: Vector) -> Counter[str]:
        """Amounts that a vector asks for, by limit."""
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
        others = Counter(self.others)
        for pool in pools:
            for limit in pool.limits:
                others[limit] += pool.requested(limit, raised[pool.key] - vector[pool.key])
        return Budget(self.limits, others)

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
        """Amounts held and asked for, as text: `7 of 8 accelerators ..., 1 by pods that end`."""
        held = self.held(pools, vector)
        ending = sum(pool.requested(ALL, pool.facts.ending) for pool in pools)
        limits = ", ".join(
            f"{held[gpu]} of {limit} {gpu or 'accelerators'}"
            for gpu, limit in sorted(self.limits.items())
        )
        is_roll_out = any(len(pool.facts.holdings) > 1 for pool in pools)
        whose = "pods that end or are of another revision" if is_roll_out else "pods that end"
        return f"{limits} are held or asked for" + (f", {ending} by {whose}" if ending else "")
