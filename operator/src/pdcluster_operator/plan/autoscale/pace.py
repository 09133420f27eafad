"""How fast a role follows its wish: up after all decisions of one window agreed, down after those of another, so far at a time.

Only the clock that never jumps counts.  An agreement is about one size: as soon
as the role has another, it starts anew, for what many workers showed says little
of few.  So a role shrinks at most once in each window.  An agreement to grow
outlasts rounds in which a backlog seems to be worked off.  A window that is not
full yet holds: an operator that has just started waits, and so does one that has
not decided for a while.
"""

from dataclasses import dataclass

from pdcluster_operator.api.autoscale import AutoscaleSpec
from pdcluster_operator.plan.autoscale import rules
from pdcluster_operator.plan.autoscale.values import Memory, Step

Wishes = tuple[tuple[float, int], ...]
"""(since when, workers) since a role wishes to go one way, the oldest first: each counts until the next begins."""

_GRAINS = 60  # parts of a window that are told apart: within one only the most careful wish is kept
_LEAST_GAP_SECONDS = 60.0


@dataclass(frozen=True)
class Pace:
    """Where a role may go now, and what is to be remembered."""

    workers: int
    wishes: Wishes = ()
    steps: tuple[Step, ...] = ()


def paced(role: str, asked: int, wish: int, spec: AutoscaleSpec, *, past: Wishes, now: float, goes_on: bool = False) -> Pace:
    """Let the wish of a role through as far as its windows and steps allow.

    past: the wishes since it has this size; goes_on: whether a wish for no change leaves an agreement to grow as it is
    """
    if wish == asked:
        return Pace(asked, past if goes_on and past and past[-1][1] > asked else ())
    rule = spec.scale_up if wish > asked else spec.scale_down
    word = "up" if wish > asked else "down"
    same_way = past if past and (past[-1][1] > asked) == (wish > asked) else ()
    wishes = _kept(same_way, (now, wish), asked, rule.window_seconds)
    since = wishes[0][0]
    if since > now - rule.window_seconds:
        why = f"asks to go {word} since {now - since:.0f} s of {rule.window_seconds} s"
        return Pace(asked, wishes, (Step(rules.WINDOW, role, wish, asked, why),))
    agreed = _careful(asked, *(each for _, each in wishes))
    steps = []
    if agreed != wish:
        why = f"of the last {rule.window_seconds} s the most careful decision counts"
        steps.append(Step(rules.WINDOW, role, wish, agreed, why))
    limit = agreed if not rule.max_step else asked + max(-rule.max_step, min(rule.max_step, agreed - asked))
    if limit != agreed:
        steps.append(Step(rules.MAX_STEP, role, agreed, limit, f"at most {rule.max_step} at a time"))
    return Pace(limit, wishes, tuple(steps))


def steadied(role: str, asked: int, wish: int, window: int, *, past: Wishes, now: float) -> Pace:
    """The greatest wish to grow of the down window: advice that nobody follows would go up and down with the load.

    past: `wishes` of the decision before
    """
    greater = tuple((at, each) for at, each in past if now - window < at and each > wish)
    wishes = (*greater, (now, wish)) if wish > asked else greater
    if not greater:
        return Pace(wish, wishes)
    why = f"{greater[0][1]} was advised {now - greater[0][0]:.0f} s ago, and advice goes down after {window} s"
    return Pace(greater[0][1], wishes, (Step(rules.WINDOW, role, wish, greater[0][1], why),))


def is_same(memory: Memory, role: str, asked: int, spec: AutoscaleSpec, now: float) -> bool:
    """Whether wishes of before count: not from before the role had its size, of another clock, or from before nobody looked for a while."""
    gap = max(_LEAST_GAP_SECONDS, (spec.stale_after + 1) * spec.interval_seconds)
    return memory.sizes.get(role) == asked and now - gap <= memory.at <= now


def _careful(asked: int, *wishes: int) -> int:
    """Of wishes to go one way the one that goes least far."""
    return min(wishes, key=lambda wish: abs(wish - asked))


def _kept(past: Wishes, new: tuple[float, int], asked: int, window: float) -> Wishes:
    """The wishes of the window with one more."""
    now, wish = new
    if not past:
        return (new,)
    last_at, last = past[-1]
    if now - last_at < window / _GRAINS:
        past = (*past[:-1], (last_at, _careful(asked, last, wish)))
    elif wish != last:
        past = (*past, new)
    num_old = sum(at <= now - window for at, _ in past)
    return past[max(0, num_old - 1) :]
