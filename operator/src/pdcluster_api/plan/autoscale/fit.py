"""Bring the recommendations of the roles together: bounds, capacity, ratio band, then budget.

The same loop (see `allocate`) is run with one rule more each time, and what a rule
changes in its result is the step of that rule.  A limit that keeps a role below its
recommendation is a problem, stated without numbers that change with the load.  Where not
all can be had, the budget counts more than the band, the band more than a recommendation.
"""

from collections.abc import Mapping, Sequence

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.allocate import Allocation
from pdcluster_api.plan.autoscale.budget import Budget
from pdcluster_api.plan.autoscale.pools import Pool, Vector
from pdcluster_api.plan.autoscale.ratio import Band, ratio_text
from pdcluster_api.plan.autoscale.trace import DecisionTrace
from pdcluster_api.plan.observed.problem import Problem
from pdcluster_schema import conditions
from pdcluster_schema.autoscale import RatioSpec

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
    for want of capacity.

    recommendations: workers by role
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
    """Note what bounds and capacity leave of a recommendation; returns the workers that no pool
    takes.

    sizes: recommended, and possible
    """
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
