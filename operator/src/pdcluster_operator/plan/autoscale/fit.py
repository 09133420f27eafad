"""Bring the wishes of the roles together: bounds, capacity, the ratio band and then the budget, into one vector of all pools.

Each limit that moves a size leaves its step, and one that keeps a role from what
it wishes is a problem, told without numbers that change with the load.  Where not
all can be had, the budget counts more than the band, the band more than a wish; a
role is never made smaller than it wished or was, whichever is less, for the sake
of the other.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdcluster_operator.api import conditions
from pdcluster_operator.api.autoscale import RatioSpec
from pdcluster_operator.plan.autoscale import rules
from pdcluster_operator.plan.autoscale.budget import Budget
from pdcluster_operator.plan.autoscale.pools import Pool, Trail, Vector, trail
from pdcluster_operator.plan.autoscale.ratio import Band, Sides, capacity, largest, nearest, ratio_said, reach
from pdcluster_operator.plan.autoscale.values import Problem, Step

_PAIR = ("prefill", "decode")


@dataclass(frozen=True)
class Fitted:
    """missing: workers by role that are wished and that no pool takes, for want of capacity."""

    vector: Vector
    steps: Sequence[Step]
    problems: Sequence[Problem]
    missing: Mapping[str, int]


@dataclass(frozen=True)
class _Frame:
    """What does not change while wishes are fitted."""

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


def fit(pools: Sequence[Pool], base: Vector, wishes: Mapping[str, int], budget: Budget, ratio: RatioSpec) -> Fitted:
    """The vector that comes nearest to the wishes.  wishes: workers by role."""
    frame = _Frame({role: [pool for pool in pools if pool.facts.role == role] for role in wishes}, base, budget, Band.of(ratio))
    steps: list[Step] = []
    missing: dict[str, int] = {}
    possible = {}
    for role, wish in wishes.items():
        possible[role], missing[role] = _possible(frame, role, wish, steps)
    if tuple(wishes) == _PAIR:
        vector = _fit_pair(frame, (possible["prefill"], possible["decode"]), steps)
    else:
        vector = _fit_alone(frame, possible, steps)
    return Fitted(vector, steps, [*_ratio_problems(frame, vector), *_limited(frame, wishes, vector, steps)], missing)


def _possible(frame: _Frame, role: str, wish: int, steps: list[Step]) -> tuple[int, int]:
    """(the wish as far as bounds and capacity let the role's pools follow, what is missing for want of capacity)."""
    pools = frame.pools[role]
    size = sum(frame.base[pool.key] for pool in pools)
    if wish == size:
        return size, 0
    most = sum(max(pool.high, frame.base[pool.key]) for pool in pools)
    open_trail = frame.trail(role, down_to=wish, up_to=wish, has_room=False)
    bounded = max(min(wish, most), open_trail.first)
    reached = min(bounded, open_trail.last)
    said = ", ".join(f"{pool.name} {pool.bounds_said()}" for pool in pools)
    _note(steps, rules.BOUNDS, role, (wish, bounded), said)
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
    for role, wish in possible.items():
        sizes = frame.trail(role, down_to=wish, up_to=wish)
        size = largest(sizes.first, sizes.clip(wish), frame.budget.gate([sizes], frame.base))
        final = sizes.first if size is None else size
        _note(steps, rules.BUDGET, role, (sizes.clip(wish), final), frame.budget.used(frame.all, frame.base))
        vector |= sizes.at(final)
    return vector


def _fit_pair(frame: _Frame, wishes: tuple[int, int], steps: list[Step]) -> Vector:
    """First as if there were no budget, then within it: a type that is used up changes which pools grow, too."""
    sides, banded = _sides(frame, wishes, has_room=False), wishes
    if _distance(frame, sides.vector(wishes)) > 0.0:
        banded = nearest(sides, frame.band, lambda prefill, decode: True) or wishes
        why = f"{ratio_said(frame.pools, sides.vector(wishes))}, the band is {frame.band}"
        _note_pair(steps, rules.RATIO, wishes, banded, why)
    roomy = _sides(frame, wishes) if frame.budget.is_by_type else sides
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


def _sides(frame: _Frame, wishes: tuple[int, int], *, has_room: bool = True) -> Sides:
    """Both trails: as far down as a role wished, as far up as the band could ask for."""
    up_to = list(wishes)
    plain = [frame.trail(role, down_to=wish, up_to=wish, has_room=has_room) for role, wish in zip(_PAIR, wishes, strict=True)]
    prefill, decode = (capacity(each.pools, each.at(each.clip(wish))) for each, wish in zip(plain, wishes, strict=True))
    if frame.band.least > 0.0:
        up_to[0] = reach(wishes[0], decode, frame.band.least, frame.pools["prefill"])
    if math.isfinite(frame.band.greatest):
        up_to[1] = reach(wishes[1], prefill, 1.0 / frame.band.greatest, frame.pools["decode"])
    found = [frame.trail(role, down_to=wish, up_to=most, has_room=has_room) for role, wish, most in zip(_PAIR, wishes, up_to, strict=True)]
    return Sides(found[0], found[1], wishes)


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


def _limited(frame: _Frame, wishes: Mapping[str, int], vector: Vector, steps: Sequence[Step]) -> Iterator[Problem]:
    """Of each role that wishes for more than it gets, what keeps it from it.  For want of capacity there is another problem."""
    for role, wish in wishes.items():
        size = sum(vector[pool.key] for pool in frame.pools[role])
        cuts = [step.rule for step in steps if step.subject == role and step.after < step.before and step.rule in _LIMITS]
        if size < wish and cuts:
            limits = " and ".join(_LIMITS[rule] for rule in dict.fromkeys(cuts))
            yield Problem(conditions.SCALING_LIMITED, f"{role} needs more than its {_workers(size)}: held by {limits}")


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"
