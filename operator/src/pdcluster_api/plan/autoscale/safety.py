"""Recommend a size by the need of a role, within safety, the pending guard and the tolerance.
N/(N-1) as in [Y18]: before a worker is taken away, the busiest one's load is
spread over one worker less, and must stay under the scale-up threshold.  Here it is turned
round: how many workers must stay.  Of those that are taken away as many are
thought to be ready as could be, so that what stays ready is enough in any case.

Pending guard, softer than [Y19]: workers that are on their way are no reason to
wait, but they count as if they served, so that a need is asked for once.

Missing numbers are assumed never to change a size: a worker without them is idle
when the role would grow, at the limit when it would shrink.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.need import Signal, being_worked_off, ceil_workers
from pdcluster_api.plan.autoscale.values import short
from pdcluster_api.plan.observed.decision import Step


@dataclass(frozen=True)
class RoleSize:
    """Size of a role.

    asked: workers that are asked for now
    ready: those that serve
    top:   those that no node takes and that a smaller StatefulSet would remove first
    lost:  those that will not come
    """

    role: str
    asked: int
    ready: int
    top: int = 0
    lost: int = 0


@dataclass(frozen=True)
class RoleSignals:
    """Signals of a role.

    workers: of the role that give numbers, or should
    silent:  those of them that do not
    missing: workers whose part of a signal is missing, those of another role included
    """

    signals: Sequence[Signal]
    workers: int
    silent: int = 0
    missing: int = 0


@dataclass(frozen=True)
class Recommendation:
    """Workers that a role would have if nothing else limited it.

    goes_on: whether the stabilization window to scale up outlasts it
    """

    workers: int
    steps: tuple[Step, ...] = ()
    goes_on: bool = False


@dataclass(frozen=True)
class _Need:
    """Workers that the signals ask for.  tight: the signal that asks for most; None = none asks"""

    plain: float
    headroom: float
    tight: Signal | None

    @property
    def with_headroom(self) -> float:
        return self.plain * (1.0 + self.headroom)

    @property
    def wanted(self) -> int:
        """Whole workers, headroom included."""
        return max(1, ceil_workers(self.with_headroom))

    def sum(self) -> str:
        """`engine_busy_ratio 3 x 0.9 / 0.8`."""
        return "none is busy" if self.tight is None else f"{self.tight.name} {self.tight.sum}"


def _need_of(signals: Sequence[Signal], headroom: float) -> _Need:
    tight = max(signals, key=lambda signal: signal.need, default=None)
    return _Need(0.0 if tight is None else tight.need, headroom, tight)


def recommend(size: RoleSize, seen: RoleSignals, *, headroom: float, tolerance: float) -> Recommendation:
    """Recommend a size for a role that has workers."""
    if size.ready == 0:
        return _recommend_without_ready(size)
    if seen.silent >= seen.workers:
        return _held(size, rules.METRICS, f"none of {size.ready} ready workers gives numbers that can be used")
    over = [signal for signal in seen.signals if signal.is_over(tolerance)]
    need = _need_of([signal for signal in seen.signals if signal.is_load or signal in over], headroom)
    lifted = need.with_headroom > (size.asked - size.lost) * (1.0 + tolerance) and headroom > 0.0
    if (over or lifted) and (queue := being_worked_off(seen.signals, tolerance)) is not None:
        seconds = f"it falls by {short(queue.falls)} a second and is under it in {queue.worked_off_seconds():.0f} s"
        return replace(_held(size, rules.NEED, f"{queue.said()}, but {seconds}"), goes_on=True)
    if over or lifted:
        return _growth(size, over, need)
    under = all(signal.is_under() for signal in seen.signals)
    if under and seen.missing:
        return _held(size, rules.METRICS, f"{seen.missing} ready workers give no numbers that can be used: none is taken away")
    if under and all(signal.is_under(tolerance) for signal in seen.signals):
        return _shrinkage(size, seen, need)
    near = [signal for signal in seen.signals if signal.is_over() or (under and not signal.is_under(tolerance))]
    if not near:
        return Recommendation(size.asked)
    return _held(size, rules.TOLERANCE, f"{_said(near)}, but within {tolerance:.0%} of its threshold")


def _recommend_without_ready(size: RoleSize) -> Recommendation:
    if size.asked == 0:
        return Recommendation(0)
    if size.lost < size.asked:
        return _held(size, rules.PENDING, f"none of {size.asked} workers is ready yet")
    why = f"no worker is ready, and {size.lost} that are asked for will not come"
    return Recommendation(size.asked + 1, (Step(rules.NEED, size.role, size.asked, size.asked + 1, why),))


def _growth(size: RoleSize, over: Sequence[Signal], need: _Need) -> Recommendation:
    plain = max(1, ceil_workers(need.plain)) + size.lost
    goal = need.wanted + size.lost
    why = _said(over) if over else f"{short(need.plain)} workers are busy up to their threshold"
    lost = f", and {size.lost} that are asked for will not come" if size.lost else ""
    if goal <= size.asked:
        if goal <= size.ready:
            return _held(size, rules.PENDING, f"{why}: the workers have not had their part for {rules.GRACE_ROUNDS} scrapes{lost}")
        return _held(size, rules.PENDING, f"{why}: {goal} are needed and {size.asked} are asked for, {size.ready} of them ready{lost}")
    steps = []
    if plain > size.asked:
        says = f"{over[0].said()}: {over[0].sum}" if over == [need.tight] else f"{why}; {need.sum()}"
        steps.append(
            Step(rules.NEED, size.role, size.asked, plain, f"{says} = {short(need.plain)}, needs {ceil_workers(need.plain)}{lost}")
        )
    if goal > plain:
        says = f"{goal - plain} above the need: {need.sum()}, x {1.0 + need.headroom:g} = {short(need.with_headroom)}"
        steps.append(Step(rules.HEADROOM, size.role, max(size.asked, plain), goal, says))
    return Recommendation(goal, tuple(steps))


def _shrinkage(size: RoleSize, seen: RoleSignals, need: _Need) -> Recommendation:
    tight = max(seen.signals, key=lambda signal: safe_workers(signal, seen.workers))
    safe = safe_workers(tight, seen.workers)
    plain, goal = _least(size, need.wanted), _least(size, max(need.wanted, safe))
    if plain >= size.asked:
        return Recommendation(size.asked)
    headroom = f", x {1.0 + need.headroom:g} for headroom" if need.headroom and need.plain else ""
    unready = "" if size.ready >= size.asked else f"; {size.ready} of {size.asked} are ready, and any of them could go"
    why = f"{_said(seen.signals)}; {need.sum()} = {short(need.plain)}{headroom}, needs {need.wanted}{unready}"
    steps = [Step(rules.NEED, size.role, size.asked, plain, why)]
    if goal > plain:
        load = tight.peak * seen.workers / (safe - 1)
        sum_ = f"{short(tight.peak)} x {seen.workers} / {safe - 1} = {short(load)} is not under {short(tight.up)}"
        steps.append(Step(rules.SAFETY, size.role, plain, goal, f"{tight.name} of the busiest worker with fewer than {safe}: {sum_}"))
    return Recommendation(goal, tuple(steps))


def safe_workers(signal: Signal, workers: int) -> int:
    """The fewest workers that keep the busiest under its scale-up threshold, if load is spread
    again.

    [Y18] checks for a step from N to N-1 whether peak * N / (N-1) is under the threshold.
    """
    return min(workers, math.floor(signal.peak * workers / signal.up + 1e-9) + 1)


def _least(size: RoleSize, stay: int) -> int:
    """The smallest size that keeps `stay` workers ready, even if all that were taken away were."""
    ready = min(size.ready, size.asked)
    waiting = min(size.top, size.asked - ready)
    return max(1, size.asked - max(0, ready - stay) - waiting)


def _held(size: RoleSize, rule: str, why: str) -> Recommendation:
    return Recommendation(size.asked, (Step(rule, size.role, size.asked, size.asked, why),))


def _said(signals: Sequence[Signal]) -> str:
    return ", ".join(signal.said() for signal in signals)
