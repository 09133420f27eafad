"""The budget of accelerators, in all and by type.

Accelerators count as long as a pod may hold them: what runs, what ends, and what
is asked for.  So growth waits until the pods that make room for it are gone, and
a decision keeps to the budget in whatever order it is carried out.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdcluster_api.plan.autoscale.pools import ALL, Pool, Vector
from pdcluster_api.plan.autoscale.values import PoolFacts
from pdcluster_api.schema.autoscale import BudgetSpec
from pdcluster_api.schema.values import MAX_WORKERS


@dataclass(frozen=True)
class Budget:
    """Limits by GPU type, the total under its own key; without any, all fits.

    others: accelerators that pools which are no longer declared still hold
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
            limits[ALL] = min(limits.get(ALL, MAX_WORKERS), MAX_WORKERS)
        others = Counter[str]()
        for facts in undeclared:
            others[ALL] += facts.current
            if facts.gpu != ALL:  # else its type is not known any more
                others[facts.gpu] += facts.current
        return cls(limits, others)

    def limits_of(self, pool: Pool) -> list[str]:
        """The limits that workers of a pool count in."""
        return [gpu for gpu in self.limits if gpu in (ALL, pool.facts.gpu)]

    def asked(self, pools: Iterable[Pool], vector: Vector) -> Counter[str]:
        """Accelerators that a vector asks for, by type and in all."""
        return self._sums((pool, vector[pool.key]) for pool in pools)

    def held(self, pools: Iterable[Pool], vector: Vector) -> Counter[str]:
        """Accelerators that may be held at some time on the way to a vector."""
        return self._sums((pool, pool.facts.held(vector[pool.key])) for pool in pools)

    def _sums(self, numbers: Iterable[tuple[Pool, int]]) -> Counter[str]:
        sums = Counter(self.others)
        for pool, number in numbers:
            sums[pool.facts.gpu] += number
            sums[ALL] += number
        return sums

    def room(self, pools: Sequence[Pool], vector: Vector) -> dict[str, tuple[int, int]]:
        """Accelerators that may still be asked for, and held, within each limit; none where it is
        exceeded.
        """
        asked, held = self.asked(pools, vector), self.held(pools, vector)
        return {
            gpu: (max(0, limit - asked[gpu]), max(0, limit - held[gpu]))
            for gpu, limit in self.limits.items()
        }

    def keeping(self, pools: Iterable[Pool], raised: Vector, vector: Vector) -> "Budget":
        """The budget less the room that pending raises wait for, so that no other pool takes it."""
        others = Counter(self.others)
        for pool in pools:
            waiting = raised[pool.key] - vector[pool.key]
            others[pool.facts.gpu] += waiting
            others[ALL] += waiting
        return Budget(self.limits, others)

    def over(self, pools: Sequence[Pool], vector: Vector) -> str | None:
        """Limits that are exceeded, as text; None = none is."""
        asked = self.asked(pools, vector)
        found = [
            f"{gpu or 'in all'}: {asked[gpu]} of {limit}"
            for gpu, limit in self.limits.items()
            if asked[gpu] > limit
        ]
        return ", ".join(found) or None

    def used(self, pools: Sequence[Pool], vector: Vector) -> str:
        """Accelerators held and asked for, as text: `7 of 8 accelerators, 1 of them in pods that
        end`.
        """
        held = self.held(pools, vector)
        ending = sum(pool.facts.ending for pool in pools)
        limits = ", ".join(
            f"{held[gpu]} of {limit} {gpu or 'accelerators'}"
            for gpu, limit in sorted(self.limits.items())
        )
        is_roll_out = any(len(pool.facts.holdings) > 1 for pool in pools)
        whose = "pods that end or are of another revision" if is_roll_out else "pods that end"
        return f"{limits} are held or asked for" + (f", {ending} by {whose}" if ending else "")
