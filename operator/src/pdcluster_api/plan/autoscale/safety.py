"""Recommend a size by the need of a role, and hold it for a window. N/(N-1) as in Dynamo's planner,
turned round: how many workers must stay, if the busiest one's load is spread; of a latency, by
what fewer workers would make of it. Missing numbers never change a size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.latency import MeasuredLatency
from pdcluster_api.plan.autoscale.signals import (
    KV_USAGE,
    Signal,
    being_worked_off,
    ceil_workers,
)
from pdcluster_api.plan.autoscale.values import DecisionTrace, Memory, short
from pdcluster_api.plan.observed.state import DecisionStep
from pdcluster_schema.autoscale import AutoscaleSpec


@dataclass(frozen=True)
class RoleState:
    """Size and signals of a role."""

    name: str
    requested: int  # workers that are asked for now
    ready: int  # those that serve
    top: int = 0  # those that no node takes and that a smaller StatefulSet would remove first
    lost: int = 0  # those that will not come
    signals: Sequence[Signal] = ()
    workers: int = 0  # of the role that give numbers, or should
    silent: int = 0  # those of them that do not
    missing: int = 0  # workers whose part of a signal is missing, those of another role included
    headroom: float = 0.0  # share of its need that it has more

    def with_headroom(self, tight: Signal | None) -> float:
        """Workers that the most demanding signal asks for, with headroom; 0 without one."""
        return _need(tight) * (1.0 + self.headroom)

    def needed(self, tight: Signal | None) -> int:
        return max(1, ceil_workers(self.with_headroom(tight)))


@dataclass(frozen=True)
class Recommendation:
    """Workers that a role would have if nothing else limited it."""

    workers: int
    steps: tuple[DecisionStep, ...] = ()
    goes_on: bool = False  # whether the stabilization window to scale up outlasts it


def _need(tight: Signal | None) -> float:
    return 0.0 if tight is None else tight.need


def _need_text(tight: Signal | None) -> str:
    return "none is busy" if tight is None else f"{tight.name} {tight.sum}"


def recommend(role: RoleState, tolerance: float) -> Recommendation:
    if role.ready == 0:
        return _recommend_without_ready(role)
    if role.silent >= role.workers:
        why = f"none of {role.ready} ready workers gives numbers that can be used"
        return _held(role, rules.METRICS, why)
    over = [signal for signal in role.signals if signal.is_over(tolerance)]
    counted = [signal for signal in role.signals if signal.is_load or signal in over]
    tight = max(counted, key=lambda signal: signal.need, default=None)
    served = (role.requested - role.lost) * (1.0 + tolerance)
    lifted = role.with_headroom(tight) > served and role.headroom > 0.0
    if over or lifted:
        if (queue := being_worked_off(role.signals, tolerance)) is None:
            return _growth(role, over, tight)
        seconds = f"is under it in {queue.worked_off_seconds():.0f} s"
        why = f"{queue.describe()}, but it falls by {short(queue.falls)} a second and {seconds}"
        return replace(_held(role, rules.NEED, why), goes_on=True)
    under = all(signal.is_under() for signal in role.signals)
    if under and role.missing:
        why = f"{role.missing} ready workers give no numbers that can be used: none is taken away"
        return _held(role, rules.METRICS, why)
    thin = [each.latency for each in role.signals if each.latency and each.latency.is_thin]
    if under and thin:
        return _held(role, rules.METRICS, ", ".join(map(_thin_text, thin)))
    if under and all(signal.is_under(tolerance) for signal in role.signals):
        return _shrinkage(role, tight)
    near = [
        signal
        for signal in role.signals
        if signal.is_over() or (under and not signal.is_under(tolerance))
    ]
    if not near:
        return Recommendation(role.requested)
    why = f"{_describe(near)}, but within {tolerance:.0%} of its threshold"
    return _held(role, rules.TOLERANCE, why)


def _thin_text(latency: MeasuredLatency) -> str:
    number = short(latency.observed.count)
    has = f"{number} of {latency.least_samples} samples"
    if latency.observed.count >= latency.least_samples:
        has = f"{number} samples, of workers whose buckets have no bound in common"
    return f"{latency.name} has {has}: none is taken away"


def _recommend_without_ready(role: RoleState) -> Recommendation:
    if role.requested == 0:
        return Recommendation(0)
    if role.lost < role.requested:
        return _held(role, rules.PENDING, f"none of {role.requested} workers is ready yet")
    why, more = f"no worker is ready, and {role.lost} that are asked for will not come", 1
    step = DecisionStep(rules.NEED, role.name, role.requested, role.requested + more, why)
    return Recommendation(role.requested + more, (step,))


def _growth(role: RoleState, over: Sequence[Signal], tight: Signal | None) -> Recommendation:
    need, requested = _need(tight), role.requested
    plain = max(1, ceil_workers(need)) + role.lost
    goal = role.needed(tight) + role.lost
    why = _describe(over) if over else f"{short(need)} workers are busy up to their threshold"
    lost = f", and {role.lost} that are asked for will not come" if role.lost else ""
    if goal <= role.ready and goal <= requested:
        late = f"the workers have not had their part for {rules.GRACE_ROUNDS} scrapes"
        return _held(role, rules.PENDING, f"{why}: {late}{lost}")
    if goal <= requested:
        text = f"{goal} are needed and {requested} are asked for, {role.ready} of them ready"
        return _held(role, rules.PENDING, f"{why}: {text}{lost}")
    steps = []
    if plain > requested:
        is_plain = over == [tight]
        text = f"{over[0].describe()}: {over[0].sum}" if is_plain else f"{why}; {_need_text(tight)}"
        text += f" = {short(need)}, needs {ceil_workers(need)}{lost}"
        steps.append(DecisionStep(rules.NEED, role.name, requested, plain, text))
    if goal > plain:
        text = (
            f"{goal - plain} above the need: {_need_text(tight)}, x {1.0 + role.headroom:g} = "
            f"{short(role.with_headroom(tight))}"
        )
        before = max(requested, plain)
        steps.append(DecisionStep(rules.HEADROOM, role.name, before, goal, text))
    return Recommendation(goal, tuple(steps))


def _shrinkage(role: RoleState, tight: Signal | None) -> Recommendation:
    need, needed = _need(tight), role.needed(tight)
    busiest = max(role.signals, key=lambda signal: safe_workers(signal, role.workers))
    safe = safe_workers(busiest, role.workers)
    plain, goal = _least(role, needed), _least(role, max(needed, safe))
    if plain >= role.requested:
        return Recommendation(role.requested)
    headroom = f", x {1.0 + role.headroom:g} for headroom" if role.headroom and need else ""
    unready = ""
    if role.ready < role.requested:
        unready = f"; {role.ready} of {role.requested} are ready, and any of them could go"
    why = (
        f"{_describe(role.signals)}; {_need_text(tight)} = {short(need)}{headroom}, needs "
        f"{needed}{unready}"
    )
    steps = [DecisionStep(rules.NEED, role.name, role.requested, plain, why)]
    if goal > plain:
        text = _unsafe_text(busiest, role.workers, safe - 1)
        steps.append(DecisionStep(rules.SAFETY, role.name, plain, goal, text))
    return Recommendation(goal, tuple(steps))


def safe_workers(signal: Signal, workers: int) -> int:
    """The fewest workers that keep the busiest under its scale-up threshold, if load is spread
    again: Dynamo's planner checks peak * N / (N-1) for a step from N to N-1.  Of a latency, the
    fewest with which it is expected to hold its objective.
    """
    if signal.latency is None:
        return min(workers, math.floor(signal.peak * workers / signal.up + 1e-9) + 1)
    stay = workers
    while stay > 1 and signal.latency.predicted(workers / (stay - 1)) <= signal.up:
        stay -= 1
    return stay


def is_short_of_blocks(decode: RoleState) -> bool:
    """Return whether its KV cache is over its threshold: requests that wait for blocks then count
    in the prefill queue, and more prefill workers are of no use to them.
    """
    return any(signal.name == KV_USAGE and signal.is_over() for signal in decode.signals)


def busy_workers(role: RoleState) -> int:
    """Workers that a role needs by their use alone; all of them unless that is under its scale-down
    threshold, or while some give no numbers.
    """
    shares = [signal for signal in role.signals if signal.is_share]
    if not shares or role.missing or not all(signal.is_under() for signal in shares):
        return role.requested
    safe = max(safe_workers(signal, role.workers) for signal in shares)
    return _least(role, max(*(ceil_workers(signal.need) for signal in shares), safe, 1))


def _unsafe_text(busiest: Signal, workers: int, fewer: int) -> str:
    """fewer: workers that are too few."""
    latency = busiest.latency
    if latency is None:
        load = busiest.peak * workers / fewer
        return (
            f"{busiest.name} of the busiest worker with fewer than {fewer + 1}: "
            f"{short(busiest.peak)} x {workers} / {fewer} = {short(load)} is not under "
            f"{short(busiest.up)}"
        )
    return (
        f"{busiest.name} {short(latency.seconds)}, {short(latency.queue)} of it in the queue, with "
        f"{fewer} of {workers} workers: {short(latency.predicted(workers / fewer))} expected, over "
        f"{short(busiest.up)}"
    )


def _least(role: RoleState, stay: int) -> int:
    """The smallest size that keeps `stay` workers ready, even if all that were taken away were."""
    ready = min(role.ready, role.requested)
    waiting = min(role.top, role.requested - ready)
    return max(1, role.requested - max(0, ready - stay) - waiting)


def _held(role: RoleState, rule: str, why: str) -> Recommendation:
    step = DecisionStep(rule, role.name, role.requested, role.requested, why)
    return Recommendation(role.requested, (step,))


def _describe(signals: Sequence[Signal]) -> str:
    return ", ".join(signal.describe() for signal in signals)


# (since when, workers) since the direction last changed, the oldest first: each holds until the
# next begins
Recommendations = tuple[tuple[float, int], ...]

_GRAINS = 60  # parts of a window: of each part only the most careful recommendation is kept
_LEAST_GAP_SECONDS = 60.0


def stabilize(
    role: str,
    requested: int,
    recommended: int,
    spec: AutoscaleSpec,
    *,
    past: Recommendations,
    now: float,
    trace: DecisionTrace,
    goes_on: bool = False,
) -> tuple[int, Recommendations]:
    """The workers that are allowed now, and the recommendations to remember: a role scales once
    every recommendation of a window agreed, and by the largest step at most. past: recommendations
    since the role has this size; goes_on: whether a recommendation of no change keeps a window to
    scale up
    """
    if recommended == requested:
        return requested, past if goes_on and past and past[-1][1] > requested else ()
    rule = spec.scale_up if recommended > requested else spec.scale_down
    word = "up" if recommended > requested else "down"
    same_way = past if past and (past[-1][1] > requested) == (recommended > requested) else ()
    recommendations = _kept(same_way, (now, recommended), requested, rule.window_seconds)
    since = recommendations[0][0]
    if since > now - rule.window_seconds:
        why = f"asks to go {word} since {now - since:.0f} s of {rule.window_seconds} s"
        trace.step(rules.WINDOW, role, (recommended, requested), why)
        return requested, recommendations
    agreed = _careful(requested, *(each for _, each in recommendations))
    why = f"of the last {rule.window_seconds} s the most careful decision counts"
    trace.step(rules.WINDOW, role, (recommended, agreed), why)
    limit = agreed
    if rule.max_step:
        limit = requested + max(-rule.max_step, min(rule.max_step, agreed - requested))
    trace.step(rules.MAX_STEP, role, (agreed, limit), f"at most {rule.max_step} at a time")
    return limit, recommendations


def stabilize_advice(
    role: str,
    requested: int,
    recommended: int,
    window: int,
    *,
    past: Recommendations,
    now: float,
    trace: DecisionTrace,
) -> tuple[int, Recommendations]:
    """The workers to advise, and the recommendations to remember: the greatest recommendation to
    scale up within the scale-down window, since advice would follow each swing of the load
    otherwise. past: what the decision before returned to remember
    """
    greater = tuple((at, each) for at, each in past if now - window < at and each > recommended)
    recommendations = (*greater, (now, recommended)) if recommended > requested else greater
    if not greater:
        return recommended, recommendations
    at, most = greater[0]
    why = f"{most} was advised {now - at:.0f} s ago, and advice goes down after {window} s"
    trace.step(rules.WINDOW, role, (recommended, most), why)
    return most, recommendations


def is_same(memory: Memory, role: str, requested: int, spec: AutoscaleSpec, now: float) -> bool:
    gap = max(_LEAST_GAP_SECONDS, spec.fresh_seconds)
    return memory.sizes.get(role) == requested and now - gap <= memory.at <= now


def _careful(requested: int, *recommendations: int) -> int:
    return min(recommendations, key=lambda recommended: abs(recommended - requested))


def _kept(
    past: Recommendations, new: tuple[float, int], requested: int, window: float
) -> Recommendations:
    now, recommended = new
    if not past:
        return (new,)
    last_at, last = past[-1]
    if now - last_at < window / _GRAINS:
        past = (*past[:-1], (last_at, _careful(requested, last, recommended)))
    elif recommended != last:
        past = (*past, new)
    num_old = sum(at <= now - window for at, _ in past)
    return past[max(0, num_old - 1) :]
