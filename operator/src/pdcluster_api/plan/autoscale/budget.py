"""The budget of accelerators, in all and by type.

Accelerators count as long as a pod may hold them: what runs, what ends, and what
is asked for.  So growth waits until the pods that make room for it are gone, and
a decision keeps to the budget in whatever order it is carried out.  A budget
that is exceeded all the same (it was lowered, or a user scaled by hand) takes
workers away at once, below minReplicas too, but never the last worker of a role,
nor the last ready one: it waits until another is ready, whatever is exceeded meanwhile.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.giving import given_up, roles_of
from pdcluster_api.plan.autoscale.pools import ALL, Pool, Trail, Vector, num_ready_left
from pdcluster_api.plan.autoscale.values import PoolFacts
from pdcluster_api.plan.observed.decision import Step
from pdcluster_api.plan.observed.problem import Problem
from pdcluster_api.schema import conditions
from pdcluster_api.schema.autoscale import BudgetSpec
from pdcluster_api.schema.values import MAX_WORKERS
from pdcluster_api.schema.workload import PoolKey

Amount = Callable[[Pool, int], int]
Gate = Callable[..., bool]
"""Whether a size of each trail fits; true of smaller ones where it is true of greater ones."""


def _asked(pool: Pool, replicas: int) -> int:
    return replicas


def _held(pool: Pool, replicas: int) -> int:
    return pool.held(replicas)


def _sum(pools: Iterable[Pool], vector: Vector, gpu: str, amount: Amount) -> int:
    return sum(amount(pool, vector[pool.key]) for pool in pools if gpu in (ALL, pool.facts.gpu))


@dataclass(frozen=True)
class Budget:
    """Limits by GPU type, the total under its own key.

    others: accelerators that pools which are no longer declared still hold
    """

    limits: Mapping[str, int]
    others: Mapping[str, int]

    @classmethod
    def of(cls, spec: BudgetSpec, undeclared: Iterable[PoolFacts], pools: Iterable[Pool]) -> "Budget":
        """Limits of the spec, and the most one object may have where its pools allow more together."""
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

    def asked(self, pools: Iterable[Pool], vector: Vector) -> Counter[str]:
        """Accelerators that a vector asks for, by type and in all."""
        return self._sums(pools, vector, _asked)

    def held(self, pools: Iterable[Pool], vector: Vector) -> Counter[str]:
        """Accelerators that may be held at some time on the way to a vector."""
        return self._sums(pools, vector, _held)

    def _sums(self, pools: Iterable[Pool], vector: Vector, amount: Amount) -> Counter[str]:
        sums = Counter(self.others)
        for pool in pools:
            number = amount(pool, vector[pool.key])
            sums[pool.facts.gpu] += number
            sums[ALL] += number
        return sums

    def keeping(self, pools: Iterable[Pool], raised: Vector, vector: Vector) -> "Budget":
        """The budget less the room that pending raises wait for, so that no other pool takes it."""
        others = Counter(self.others)
        for pool in pools:
            waiting = raised[pool.key] - vector[pool.key]
            others[pool.facts.gpu] += waiting
            others[ALL] += waiting
        return Budget(self.limits, others)

    def gate(self, trails: Sequence[Trail], base: Vector) -> Gate:
        """Return a check whether sizes of these trails fit.

        They fit within every limit, or at least not beyond where `base` is beyond it.
        Every size is summed up once at most, since a search asks for many pairs of them.
        """
        pools = [pool for each in trails for pool in each.pools]
        amounts = ((_asked, self.asked(pools, base)), (_held, self.held(pools, base)))
        checks = [(gpu, amount, max(limit, now[gpu])) for gpu, limit in self.limits.items() for amount, now in amounts]

        @cache
        def used(place: int, size: int) -> Sequence[int]:
            vector = trails[place].at(size)
            return [_sum(trails[place].pools, vector, gpu, amount) for gpu, amount, _ in checks]

        def fits(*sizes: int) -> bool:
            columns = [used(place, size) for place, size in enumerate(sizes)]
            return all(
                sum(column[row] for column in columns) <= most - self.others.get(gpu, 0) for row, (gpu, _, most) in enumerate(checks)
            )

        return fits

    def room(self, pools: Sequence[Pool], base: Vector) -> dict[str, int]:
        """Accelerators that are free, by each type that has a limit, and in all under `ALL`."""
        held = self.held(pools, base)
        return {gpu: max(0, limit - held[gpu]) for gpu, limit in self.limits.items()}

    def over(self, pools: Sequence[Pool], vector: Vector) -> str | None:
        """Limits that are exceeded, as text; None = none is."""
        asked = self.asked(pools, vector)
        found = [f"{gpu or 'in all'}: {asked[gpu]} of {limit}" for gpu, limit in self.limits.items() if asked[gpu] > limit]
        return ", ".join(found) or None

    def used(self, pools: Sequence[Pool], vector: Vector) -> str:
        """Accelerators held and asked for, as text: `7 of 8 accelerators, 1 of them in pods that
        end`.
        """
        held = self.held(pools, vector)
        ending = sum(pool.facts.ending for pool in pools)
        limits = ", ".join(f"{held[gpu]} of {limit} {gpu or 'accelerators'}" for gpu, limit in sorted(self.limits.items()))
        is_roll_out = any(len(pool.facts.holdings) > 1 for pool in pools)
        whose = "pods that end or are of another revision" if is_roll_out else "pods that end"
        return f"{limits} are held or asked for" + (f", {ending} by {whose}" if ending else "")


@dataclass(frozen=True)
class Trimmed:
    """A base within the budget.  budget: in which what a raise waits for is taken"""

    vector: Vector
    steps: Sequence[Step]
    problem: Problem | None
    budget: Budget


def trimmed(budget: Budget, pools: Sequence[Pool], base: Vector, sizes: Vector) -> Trimmed:
    """Reduce the base to the budget; the pool farthest above its minReplicas gives first.

    sizes: those from which minReplicas raised the base; a raise waits for accelerators of
           terminating pods
    """
    vector = dict(base)
    for gpu, limit in sorted(budget.limits.items(), reverse=True):  # all together last: what a type forbids takes no room there
        excess = budget.asked(pools, vector)[gpu] - limit
        vector = given_up(excess, [pool for pool in pools if gpu in (ALL, pool.facts.gpu)], pools, vector)
    _keep_ready(pools, vector)
    raised = dict(vector)
    _wait_for_room(budget, pools, vector, sizes)
    said = budget.over(pools, base) or budget.used(pools, vector)
    steps = [_step(pool, base[pool.key], vector[pool.key], sizes[pool.key], said) for pool in pools if vector[pool.key] != base[pool.key]]
    return Trimmed(vector, steps, _problem(budget, pools, vector), budget.keeping(pools, raised, vector))


def _step(pool: Pool, base: int, after: int, size: int, said: str) -> Step:
    if after > base:
        return Step(rules.NEVER_ALONE, pool.name, base, after, "no other worker of the role is ready: it waits until another is ready")
    why = f"the budget is exceeded ({said})" if after < size else f"it waits for room: {said}"
    return Step(rules.BUDGET, pool.name, base, after, why)


def _keep_ready(pools: Sequence[Pool], vector: dict[PoolKey, int]) -> None:
    """Leave a role its last ready worker where bounds have taken it."""
    for mine in roles_of(pools):
        last = max(mine, key=lambda pool: (pool.facts.ready, -pool.price, -pool.order))
        if last.facts.ready and not num_ready_left(mine, vector):
            vector[last.key] = last.ready_top - last.facts.ready + 1


def _wait_for_room(budget: Budget, pools: Sequence[Pool], vector: dict[PoolKey, int], sizes: Vector) -> None:
    for gpu, limit in sorted(budget.limits.items()):
        most = max(limit, budget.held(pools, sizes)[gpu])
        for pool in pools:
            if gpu in (ALL, pool.facts.gpu) and vector[pool.key] > sizes[pool.key]:
                free = most - budget.held(pools, vector)[gpu] + pool.held(vector[pool.key])
                steps = range(sizes[pool.key], vector[pool.key] + 1)
                vector[pool.key] = steps[max(0, bisect_right(steps, free, key=pool.held) - 1)]
    for mine in roles_of(pools):
        last = max(mine, key=lambda pool: sizes[pool.key])
        if sizes[last.key] and not any(vector[pool.key] for pool in mine):
            vector[last.key] = 1  # until the one that is to take its place has room


def _problem(budget: Budget, pools: Sequence[Pool], vector: Vector) -> Problem | None:
    over = budget.over(pools, vector)
    if over is not None:
        is_least = all(sum(vector[pool.key] for pool in mine) <= 1 for mine in roles_of(pools))
        why = "one worker of each role is more than" if is_least else "the last ready worker of a role waits until another is ready, over"
        return Problem(conditions.BUDGET_TOO_SMALL, f"{why} the budget ({over}): raise autoscale.budget")
    short = [f"{pool.name} has {vector[pool.key]} of minReplicas {pool.low}" for pool in pools if vector[pool.key] < pool.low]
    if short:
        return Problem(conditions.BUDGET_TOO_SMALL, f"{', '.join(short)}: raise autoscale.budget or lower minReplicas")
    return None
