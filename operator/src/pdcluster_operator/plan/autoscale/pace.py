"""How fast a role follows its wish: up after all decisions of one window agreed, down after those of another, so far at a time.

Only the clock that never jumps counts.  An agreement is about one size: as soon
as the role has another, it starts anew, for what many workers showed says little
of few.  So a role shrinks at most once in each window.  A window that is not
full yet holds: an operator that has just started waits.
"""

from dataclasses import dataclass

from pdcluster_operator.api.autoscale import AutoscaleSpec
from pdcluster_operator.plan.autoscale import rules
from pdcluster_operator.plan.autoscale.values import Memory, Step

Wishes = tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class Pace:
    """Where a role may go now, and what is to be remembered."""

    workers: int
    wishes: Wishes
    steps: tuple[Step, ...] = ()


def paced(role: str, asked: int, wish: int, spec: AutoscaleSpec, *, past: Wishes, now: float) -> Pace:
    """Let the wish of a role through as far as its windows and steps allow.  past: the wishes since it has this size."""
    wishes = _kept((*past, (now, wish)), now, max(spec.scale_up.window_seconds, spec.scale_down.window_seconds))
    if wish == asked:
        return Pace(asked, wishes)
    rule = spec.scale_up if wish > asked else spec.scale_down
    word = "up" if wish > asked else "down"
    span, agreed = _agreed(wishes, asked, wish, now, rule.window_seconds)
    if agreed is None:
        why = f"asks to go {word} since {span:.0f} s of {rule.window_seconds} s"
        return Pace(asked, wishes, (Step(rules.WINDOW, role, wish, asked, why),))
    steps = []
    if agreed != wish:
        why = f"of the last {rule.window_seconds} s the most careful decision counts"
        steps.append(Step(rules.WINDOW, role, wish, agreed, why))
    limit = agreed if rule.max_step is None else asked + max(-rule.max_step, min(rule.max_step, agreed - asked))
    if limit != agreed:
        steps.append(Step(rules.MAX_STEP, role, agreed, limit, f"at most {rule.max_step} at a time"))
    return Pace(limit, wishes, tuple(steps))


def past_wishes(memory: Memory, role: str, asked: int, now: float) -> Wishes:
    """The wishes that still count: none from before the role had its size, none of another clock."""
    wishes = memory.wishes.get(role, ())
    is_same = memory.sizes.get(role) == asked and all(at <= now for at, _ in wishes)
    return wishes if is_same else ()


def _agreed(wishes: Wishes, asked: int, wish: int, now: float, window: float) -> tuple[float, int | None]:
    """(for how long all wishes have gone one way, the one that goes least far or None while that is too short)."""
    nearest, since = wish, now
    for at, each in reversed(wishes):
        if (each > asked) != (wish > asked) or each == asked:
            break
        nearest = min(nearest, each) if wish > asked else max(nearest, each)
        since = at
        if at <= now - window:
            return window, nearest
    return now - since, None


def _kept(wishes: Wishes, now: float, window: float) -> Wishes:
    """The wishes of the window, of equal ones in a row the first and the last, and one from before it."""
    old = sum(at <= now - window for at, _ in wishes)
    recent = wishes[max(0, old - 1) :]
    middle = (recent[i][1] == recent[i - 1][1] == recent[i + 1][1] for i in range(1, len(recent) - 1))
    return (*recent[:1], *(each for each, is_middle in zip(recent[1:-1], middle, strict=True) if not is_middle), *recent[1:][-1:])
