"""Allocate workers to pools: one worker at a time, until a limit stops it.

A role takes a worker in its cheapest pool that can have one and gives one up in its
dearest, first those that no node takes.  A move stops at the bounds of a pool, at
capacity and at the budget.  With a ratio band a role is followed: whenever the band
finds the other role short, that one takes workers until the band is met again, and a
worker that cannot be followed so is not taken.  Of two roles that want workers the one
that misses the greater part of its recommendation has the next turn, so that a short
budget is shared.  No role becomes smaller than recommended, or than it was.

    band 0.5 to any, prefill 2 of 2 recommended, decode 4 of 5:
    decode +1        2 over 5 is under the band: prefill is short
    prefill +1       3 over 5 is within it; decode has its 5, all is done
"""

from collections.abc import Mapping, Sequence

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.pools import (
    Band,
    Budget,
    Pool,
    Vector,
    by_role,
    capacity,
    ratio_text,
    unit_of,
)
from pdcluster_api.plan.autoscale.values import Amounts, DecisionTrace
from pdcluster_api.plan.observed.state import Problem
from pdcluster_schema import conditions
from pdcluster_schema.autoscale import RatioSpec

_DUST = 1e-12


class Allocation:
    """Sizes of all pools on the way from `base`.

    sizes:  replicas by pool
    counts: workers by role
    moves:  every worker so far, as (pool, +1 or -1)
    """

    def __init__(
        self, pools: Sequence[Pool], base: Vector, budget: Budget, band: Band | None = None
    ) -> None:
        self.sizes = dict(base)
        self.moves: list[tuple[Pool, int]] = []
        self._base = base
        self._band = band or Band()
        self._cheapest = {
            role: sorted(mine, key=lambda pool: (pool.price, pool.order))
            for role, mine in by_role(pools).items()
        }
        self.counts = {
            role: sum(base[pool.key] for pool in mine) for role, mine in self._cheapest.items()
        }
        self._caps = self._base_counts = dict(self.counts)
        self.capacity = {role: capacity(role, pools, base) for role in ("prefill", "decode")}
        by_limit = {
            gpu: list(available) for gpu, available in budget.available(pools, base).items()
        }
        self._available = {
            pool.key: [(unit_of(limit), by_limit[limit]) for limit in budget.limits_of(pool)]
            for pool in pools
        }

    def approach(
        self, recommendations: Mapping[str, int], caps: Mapping[str, int] | None = None
    ) -> None:
        """Go to the recommended sizes, as near as the limits allow.  caps: sizes by role beyond
        which the band is not followed
        """
        base_counts = self._base_counts
        self._caps = {
            role: max(base_counts[role], (caps or {}).get(role, 0)) for role in base_counts
        }
        before = self.distance()
        for role, recommended in recommendations.items():
            while self.counts[role] > recommended and self.shrink(role):
                pass
        self._meet_band()
        if self.distance() > before:
            self._undo(0)
            self._meet_band()
        away, stuck = self.distance(), set[str]()
        while (role_short := self._next(recommendations, stuck)) is not None:
            mark = len(self.moves)
            if not (self.grow(role_short) and self._is_matched(away)):
                self._undo(mark)
                stuck.add(role_short)

    def distance(self) -> float:
        return self._band.distance(**self.capacity)

    def grow(self, role: str) -> bool:
        """Add a worker to a role: where it gave one up, if that room is still free, else in its
        cheapest pool that can have one.  Returns False where none can.
        """
        mine = self._cheapest[role]
        reduced = [pool for pool in mine if self.sizes[pool.key] < self._base[pool.key]]
        is_less = self.counts[role] < self._base_counts[role]
        restorable = [pool for pool in reduced if is_less and self._has_capacity(pool)]
        pool = min(
            restorable, key=lambda pool: self.sizes[pool.key] >= pool.unplaced_above, default=None
        )
        if pool is None:
            pool = next((pool for pool in mine if self._can_have(pool)), None)
        if pool is not None:
            self._move(pool, 1)
        return pool is not None

    def shrink(self, role: str) -> bool:
        """Take a worker from a role: one that no node takes, else from its dearest pool.  Returns
        False where all are at their minReplicas.
        """
        able = [pool for pool in self._cheapest[role] if self.sizes[pool.key] > pool.low]
        if not able:
            return False
        unplaced = [pool for pool in able if self.sizes[pool.key] > pool.unplaced_above]
        self._move((unplaced or able)[-1], -1)
        return True

    def move_to(self, pool: Pool, size: int) -> None:
        """Bring a pool to a size, up as far as there is room, whatever its bounds are."""
        while self.sizes[pool.key] > size:
            self._move(pool, -1)
        while self.sizes[pool.key] < size and self._can_hold(pool):
            self._move(pool, 1)

    def _can_have(self, pool: Pool) -> bool:
        size = self.sizes[pool.key] + 1
        if not (pool.is_open and pool.low <= size <= pool.high):
            return False
        return self._has_capacity(pool)

    def _has_capacity(self, pool: Pool) -> bool:
        for unit, (requested, _) in self._available[pool.key]:
            if requested < pool.one[unit]:
                return False
        return self._can_hold(pool)

    def _can_hold(self, pool: Pool) -> bool:
        by_limit = self._available[pool.key]
        if not by_limit:
            return True
        costs = self._costs(pool, self.sizes[pool.key])
        return not any(held < costs[unit] for unit, (_, held) in by_limit)

    def _next(self, recommendations: Mapping[str, int], stuck: set[str]) -> str | None:
        """The role that misses the greatest part of its recommendation; None = none can grow."""
        missing = {
            role: (recommended - self.counts[role]) / recommended
            for role, recommended in recommendations.items()
            if self.counts[role] < recommended and role not in stuck
        }
        is_first = not any(self.counts.values())

        def rank(role: str) -> tuple[float, int, bool]:
            """The role that answers goes first where none has a worker."""
            return missing[role], recommendations[role], is_first and role != "prefill"

        return max(missing, key=rank, default=None)

    def _meet_band(self) -> None:
        """Meet the band by growth; where that cannot be, come as near as the short role alone can.
        No fleet climbs for a ratio that whole workers cannot meet.
        """
        mark = len(self.moves)
        if self._is_matched(0.0):
            return
        self._undo(mark)
        role, before = self._short(), self.distance()
        while role is not None and role == self._short() and self._grow(role):
            if self.distance() >= before:
                self._undo(len(self.moves) - 1)
                return
            before = self.distance()

    def _is_matched(self, away: float) -> bool:
        """Add workers to the role that the band finds short until the band is no farther away.
        Returns False where that cannot be.
        """
        while self.distance() > away + _DUST:
            role = self._short()
            if role is None or not self._grow(role):
                return False
        return True

    def _short(self) -> str | None:
        return self._band.short(**self.capacity)

    def _grow(self, role: str) -> bool:
        return self.counts[role] < self._caps[role] and self.grow(role)

    def _move(self, pool: Pool, by: int) -> None:
        size, role = self.sizes[pool.key], pool.role
        self.sizes[pool.key] = size + by
        self.counts[role] += by
        if role in self.capacity:
            self.capacity[role] += pool.weight * by
        self.moves.append((pool, by))
        if by_limit := self._available[pool.key]:
            costs = self._costs(pool, min(size, size + by))
            for unit, available in by_limit:
                available[0] -= by * pool.one[unit]
                available[1] -= by * costs[unit]

    def _undo(self, mark: int) -> None:
        for pool, by in reversed(self.moves[mark:]):
            self._move(pool, -by)
        del self.moves[mark:]

    @staticmethod
    def _costs(pool: Pool, size: int) -> Amounts:
        before, after = pool.facts.held(size), pool.facts.held(size + 1)
        return Amounts(after.workers - before.workers, after.accelerators - before.accelerators)


_OTHER = {"prefill": "decode", "decode": "prefill"}
_LIMITS = {
    rules.BOUNDS: "maxReplicas",
    rules.RATIO: "autoscale.ratio",
    rules.BUDGET: "autoscale.budget",
}


def fit(
    pools: Sequence[Pool],
    base: Vector,
    recommendations: Mapping[str, int],
    budget: Budget,
    ratio: RatioSpec,
    *,
    trace: DecisionTrace,
) -> tuple[Vector, Mapping[str, int]]:
    """The sizes that come nearest to the recommendations, and the workers by role that are missing
    for want of capacity.  recommendations: workers by role
    """
    free = Allocation(pools, base, Budget())
    free.approach(recommendations)
    possible = dict(free.counts)
    missing = {
        role: _note_possible(pools, base, role, (recommended, possible[role]), trace=trace)
        for role, recommended in recommendations.items()
    }
    band = Band.of(ratio) if tuple(recommendations) == tuple(_OTHER) else Band()
    caps = _caps(pools, band, free)
    found = free
    if band.distance(**free.capacity) > 0.0:
        found = Allocation(pools, base, Budget(), band)
        found.approach(possible, caps)
        why = f"{ratio_text(pools, free.sizes)}, the band is {band}"
        _note_roles(trace, rules.RATIO, (possible, found.counts), why)
    if budget.limits:
        banded, found = found.counts, Allocation(pools, base, budget, band)
        found.approach(possible, caps)
        _note_roles(trace, rules.BUDGET, (banded, found.counts), budget.used(pools, base))
    if band.distance(**found.capacity) > 0.0:
        message = (
            f"{ratio_text(pools, found.sizes)}, the band is {band}: no nearer sizes are possible "
            "now; widen autoscale.ratio, or raise maxReplicas or the budget"
        )
        trace.problems.append(Problem(conditions.RATIO_CONSTRAINT_VIOLATED, message))
    _note_limited(trace, recommendations, found.counts)
    return found.sizes, missing


def _note_possible(
    pools: Sequence[Pool], base: Vector, role: str, sizes: tuple[int, int], *, trace: DecisionTrace
) -> int:
    recommended, possible = sizes
    mine = [pool for pool in pools if pool.role == role]
    most = sum(max(pool.high, base[pool.key]) for pool in mine)
    bounded = max(min(recommended, most), possible)
    text = ", ".join(f"{pool.name} {pool.bounds_text()}" for pool in mine)
    trace.step(rules.BOUNDS, role, (recommended, bounded), text)
    closed = (
        f"{pool.name} ({pool.facts.fault or f'{pool.facts.gpu} was short and is left alone'})"
        for pool in mine
        if not pool.is_open
    )
    why = f"no room for more: {', '.join(closed)}"
    trace.step(rules.CAPACITY, role, (bounded, possible), why)
    return bounded - possible


def _caps(pools: Sequence[Pool], band: Band, free: Allocation) -> Mapping[str, int]:
    """The sizes beyond which roles do not follow one another, beside what both want."""
    return {
        role: band.reach(
            role,
            size,
            free.capacity[_OTHER[role]],
            min(pool.weight for pool in pools if pool.role == role),
        )
        for role, size in free.counts.items()
        if role in _OTHER
    }


def _note_roles(
    trace: DecisionTrace, rule: str, counts: tuple[Mapping[str, int], Mapping[str, int]], why: str
) -> None:
    before, after = counts
    for role in before:
        trace.step(rule, role, (before[role], after[role]), why)


def _note_limited(
    trace: DecisionTrace, recommendations: Mapping[str, int], counts: Mapping[str, int]
) -> None:
    """Limits of each role that gets less than recommended.  Want of capacity is another problem."""
    for role, recommended in recommendations.items():
        size = counts[role]
        cuts = [
            _LIMITS[step.rule]
            for step in trace.steps
            if step.subject == role and step.after < step.before and step.rule in _LIMITS
        ]
        if size < recommended and cuts:
            workers = "1 worker" if size == 1 else f"{size} workers"
            limits = " and ".join(dict.fromkeys(cuts))
            message = f"{role} needs more than its {workers}: held by {limits}"
            trace.problems.append(Problem(conditions.SCALING_LIMITED, message))
