"""Bring the recommendations of the roles together: bounds, capacity, ratio band, then budget.

Returns one vector of all pools.  Each limit that changes a size leaves a step.  A limit
that keeps a role below its recommendation is a problem, stated without numbers that
change with the load.  Where not all can be had, the budget counts more than the band,
the band more than a recommendation.  No role becomes smaller than recommended, or than
it was, for the sake of the other.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.budget import Budget
from pdcluster_api.plan.autoscale.pools import Pool, Trail, Vector, trail
from pdcluster_api.plan.autoscale.ratio import Band, Sides, capacity, largest, nearest, ratio_said, reach
from pdcluster_api.plan.observed.decision import Step
from pdcluster_api.plan.observed.problem import Problem
from pdcluster_api.schema import conditions
from pdcluster_api.schema.autoscale import RatioSpec

_PAIR = ("prefill", "decode")


@dataclass(frozen=True)
class Fitted:
    """missing: recommended workers by role that no pool takes, for want of capacity."""

    vector: Vector
    steps: Sequence[Step]
    problems: Sequence[Problem]
    missing: Mapping[str, int]


@dataclass(frozen=True)
class _Frame:
    """Inputs that stay the same while recommendations are fitted."""

    pools: Mapping[str, Sequence[Pool]]
    base: Vector
    budget: Budget
    band: Band

    @property
    def all(self) -> list[Pool]:
        return [pool for pools in self.pools.values() for pool in pools]

    def trail(self, role: str, *, down_to: int, up_to: int, has_room: bool = True) -> Trail:
        room = self.budget.room(self.all, self.base) if has_room else {}
        return trail(self.pools[role], self.base, room, down_to=down_to, up_to=up_to)


def fit(pools: Sequence[Pool], base: Vector, recommendations: Mapping[str, int], budget: Budget, ratio: RatioSpec) -> Fitted:
    """The vector that comes nearest to the recommendations.  recommendations: workers by role."""
    frame = _Frame({role: [pool for pool in pools if pool.facts.role == role] for role in recommendations}, base, budget, Band.of(ratio))
    steps: list[Step] = []
    missing: dict[str, int] = {}
    possible = {}
    for role, recommended in recommendations.items():
        possible[role], missing[role] = _possible(frame, role, recommended, steps)
    if tuple(recommendations) == _PAIR:
        vector = _fit_pair(frame, (possible["prefill"], possible["decode"]), steps)
    else:
        vector = _fit_alone(frame, possible, steps)
    return Fitted(vector, steps, [*_ratio_problems(frame, vector), *_limited(frame, recommendations, vector, steps)], missing)


def _possible(frame: _Frame, role: str, recommended: int, steps: list[Step]) -> tuple[int, int]:
    """(recommendation within bounds and capacity, workers missing for want of capacity)."""
    pools = frame.pools[role]
    size = sum(frame.base[pool.key] for pool in pools)
    if recommended == size:
        return size, 0
    most = sum(max(pool.high, frame.base[pool.key]) for pool in pools)
    open_trail = frame.trail(role, down_to=recommended, up_to=recommended, has_room=False)
    bounded = max(min(recommended, most), open_trail.first)
    reached = min(bounded, open_trail.last)
    said = ", ".join(f"{pool.name} {pool.bounds_said()}" for pool in pools)
    _note(steps, rules.BOUNDS, role, (recommended, bounded), said)
    _note(steps, rules.CAPACITY, role, (bounded, reached), f"no room for more: {', '.join(_closed(pools))}")
    return reached, bounded - reached


def _closed(pools: Sequence[Pool]) -> Iterator[str]:
    for pool in pools:
        if not pool.is_open:
            yield f"{pool.name} ({pool.facts.fault or f'{pool.facts.gpu} was short and is left alone'})"


def _note(steps: list[Step], rule: str, subject: str, sizes: tuple[int, int], why: str) -> None:
    before, after = sizes
    if before != after:
        steps.append(Step(rule, subject, before, after, why))


def _fit_alone(frame: _Frame, possible: Mapping[str, int], steps: list[Step]) -> Vector:
    vector: dict[tuple[str, str], int] = {}
    for role, recommended in possible.items():
        sizes = frame.trail(role, down_to=recommended, up_to=recommended)
        size = largest(sizes.first, sizes.clip(recommended), frame.budget.gate([sizes], frame.base))
        final = sizes.first if size is None else size
        unlimited = frame.trail(role, down_to=recommended, up_to=recommended, has_room=False).clip(recommended)
        _note(steps, rules.BUDGET, role, (unlimited, final), frame.budget.used(frame.all, frame.base))
        vector |= sizes.at(final)
    return vector


def _fit_pair(frame: _Frame, recommendations: tuple[int, int], steps: list[Step]) -> Vector:
    """Fit without a budget, then within it.

    A limit that is reached also changes which pools grow: a pod that ends and is taken back holds
    its accelerator already, in whatever pool it is.
    """
    sides, banded = _sides(frame, recommendations, has_room=False), recommendations
    if _distance(frame, sides.vector(recommendations)) > 0.0:
        banded = nearest(sides, frame.band, lambda prefill, decode: True) or recommendations
        why = f"{ratio_said(frame.pools, sides.vector(recommendations))}, the band is {frame.band}"
        _note_pair(steps, rules.RATIO, recommendations, banded, why)
    roomy = _sides(frame, recommendations) if frame.budget.limits else sides
    fits = frame.budget.gate([roomy.prefill, roomy.decode], frame.base)
    away = _distance(frame, sides.vector(banded))
    if roomy.has(banded) and fits(*banded) and _distance(frame, roomy.vector(banded)) <= away:
        return roomy.vector(banded)
    final = nearest(roomy, frame.band, fits) or _here(frame)
    _note_pair(steps, rules.BUDGET, banded, final, frame.budget.used(frame.all, frame.base))
    return roomy.vector(final)


def _here(frame: _Frame) -> tuple[int, int]:
    prefill, decode = (sum(frame.base[pool.key] for pool in frame.pools[role]) for role in _PAIR)
    return prefill, decode


def _sides(frame: _Frame, recommendations: tuple[int, int], *, has_room: bool = True) -> Sides:
    """Both trails: as far down as recommended, as far up as the band could ask for."""
    up_to = list(recommendations)
    plain = [
        frame.trail(role, down_to=recommended, up_to=recommended, has_room=has_room)
        for role, recommended in zip(_PAIR, recommendations, strict=True)
    ]
    prefill, decode = (
        capacity(each.pools, each.at(each.clip(recommended))) for each, recommended in zip(plain, recommendations, strict=True)
    )
    if frame.band.least > 0.0:
        up_to[0] = reach(recommendations[0], decode, frame.band.least, frame.pools["prefill"])
    if math.isfinite(frame.band.greatest):
        up_to[1] = reach(recommendations[1], prefill, 1.0 / frame.band.greatest, frame.pools["decode"])
    found = [
        frame.trail(role, down_to=recommended, up_to=most, has_room=has_room)
        for role, recommended, most in zip(_PAIR, recommendations, up_to, strict=True)
    ]
    return Sides(found[0], found[1], recommendations)


def _distance(frame: _Frame, vector: Vector) -> float:
    prefill, decode = (capacity(frame.pools[role], vector) for role in _PAIR)
    return frame.band.distance(prefill, decode)


def _note_pair(steps: list[Step], rule: str, before: tuple[int, int], after: tuple[int, int], why: str) -> None:
    for role, *sizes in zip(_PAIR, before, after, strict=True):
        _note(steps, rule, role, (sizes[0], sizes[1]), why)


def _ratio_problems(frame: _Frame, vector: Vector) -> Iterator[Problem]:
    if tuple(frame.pools) != _PAIR or _distance(frame, vector) == 0.0:
        return
    message = (
        f"{ratio_said(frame.pools, vector)}, the band is {frame.band}: no nearer sizes are possible now; "
        "widen autoscale.ratio, or raise maxReplicas or the budget"
    )
    yield Problem(conditions.RATIO_CONSTRAINT_VIOLATED, message)


_LIMITS = {rules.BOUNDS: "maxReplicas", rules.RATIO: "autoscale.ratio", rules.BUDGET: "autoscale.budget"}


def _limited(frame: _Frame, recommendations: Mapping[str, int], vector: Vector, steps: Sequence[Step]) -> Iterator[Problem]:
    """Limits of each role that gets less than recommended.  Want of capacity is another problem."""
    for role, recommended in recommendations.items():
        size = sum(vector[pool.key] for pool in frame.pools[role])
        cuts = [step.rule for step in steps if step.subject == role and step.after < step.before and step.rule in _LIMITS]
        if size < recommended and cuts:
            limits = " and ".join(_LIMITS[rule] for rule in dict.fromkeys(cuts))
            yield Problem(conditions.SCALING_LIMITED, f"{role} needs more than its {_workers(size)}: held by {limits}")


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"
