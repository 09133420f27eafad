"""Stabilization windows: a role scales once every recommendation of a window agreed. A window
restarts with another size, since load on many workers says little about few; one that is not full
holds.
"""

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.values import DecisionTrace, Memory
from pdcluster_schema.autoscale import AutoscaleSpec

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
    """Apply the stabilization window and the largest step to the recommendation of a role.

    past:    recommendations since the role has this size.
    goes_on: whether a recommendation of no change keeps a window to scale up.
    Returns the workers that are allowed now, and the recommendations to remember.
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
    """Advise the greatest recommendation to scale up within the scale-down window.  Otherwise
    advice would follow each swing of the load. past: what the decision before returned to remember
    Returns the workers to advise, and the recommendations to remember.
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
    gap = max(_LEAST_GAP_SECONDS, (spec.stale_after + 1) * spec.interval_seconds)
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
