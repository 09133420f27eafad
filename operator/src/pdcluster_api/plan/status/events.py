"""Events for the changes between two statuses. Pure: planning again on the written status gives
none.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdcluster_api.plan.gates import FIELD as GATE
from pdcluster_api.plan.gates import read_gate
from pdcluster_api.plan.observed.state import Previous
from pdcluster_api.plan.result import PlannedEvent
from pdcluster_api.plan.rollout import FIELD
from pdcluster_schema import conditions as words

# Reasons that have an event of their own
_REPORTED_ELSEWHERE = frozenset(
    {
        words.SCALING,
        words.ROLLING_OUT,
        words.PROGRESS_DEADLINE_EXCEEDED,
        words.ROLLOUT_PAUSED,
        words.ROLLED_BACK,
        words.GROUP_RESTARTING,
    }
)

# Reasons that are an event only when a cluster was ready before, and then a Normal one
_PASSING = frozenset({words.STARTING, words.DOWNLOADING_MODEL})


def events(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[PlannedEvent, ...]:
    old, new = Previous(before), Previous(after)
    return (
        *_rollout(old, new),
        *_stalled(old, new),
        *_passed(old, new),
        *_appeared(old, new, words.ROLLOUT_PAUSED),
        *_appeared(old, new, words.ROLLED_BACK),
        *_scaled(old, new),
        *_ready(old, new),
        *_serving(old, new),
        *_turned(old, new, words.ACCELERATORS_IN_USE),
        *_turned(old, new, words.KV_TIERS_AVAILABLE),
        *_turned(old, new, words.OTHER_MODELS_SERVED),
        *_turned(old, new, words.DISAGGREGATING),
        *_turned(old, new, words.KV_TRANSFER_VERIFIED),
    )


def cut_short(pods: Sequence[str]) -> tuple[PlannedEvent, ...]:
    text = (
        "had not drained when rollout.drainTimeoutSeconds was over; its requests end with it, or "
        "within rollout.gracePeriodSeconds"
    )
    return tuple(PlannedEvent(words.DRAIN_CUT, f"pod {pod} {text}", warning=True) for pod in pods)


def _rollout(old: Previous, new: Previous) -> Iterator[PlannedEvent]:
    before, target = old.text("revision"), new.text("revision")
    served, serving = old.text("servingRevision"), new.text("servingRevision")
    if before not in (None, target):
        if served not in (None, target):
            over = new.condition(words.ROLLOUT_OVER_BUDGET).get("message")
            text = f"revision {target} is to replace {served}" + (f": {over}" if over else "")
            yield PlannedEvent(words.ROLLOUT_STARTED, text, warning=over is not None)
        elif serving == served:
            text = f"revision {before} is dropped; {served} goes on serving"
            yield PlannedEvent(words.ROLLOUT_DROPPED, text)
    if before == target and (changed := _changed_within(old, new)):
        text = f"{changed} is to be replaced within revision {target}; other roles stay"
        yield PlannedEvent(words.ROLLOUT_STARTED, text)
    if served not in (None, serving):
        yield PlannedEvent(words.ROLLOUT_SWITCHED, f"revision {serving} serves instead of {served}")


def _changed_within(old: Previous, new: Previous) -> str:
    """Workloads that others of their role replace from now on, as text."""
    name, target = new.mapping(FIELD).get("revision"), new.text("revision")
    is_new = name not in (None, target, old.mapping(FIELD).get("revision"))
    return ", ".join(sorted(new.kept())) if is_new else ""


def _stalled(old: Previous, new: Previous) -> Iterator[PlannedEvent]:
    """Once for each deadline, whatever else Ready speaks of then or in between."""
    before, after = old.mapping(FIELD), new.mapping(FIELD)
    if not after.get("stalled") or before.get("stalled"):
        return
    ready, reason = new.condition(words.READY), words.PROGRESS_DEADLINE_EXCEEDED
    late = "has not come forward within rollout.progressDeadlineSeconds"
    hidden = f"revision {after['revision']} {late}: {after['stalled']}"
    message = ready["message"] if ready["reason"] == reason else hidden
    yield PlannedEvent(reason, message, warning=True)


def _passed(old: Previous, new: Previous) -> Iterator[PlannedEvent]:
    before, after = read_gate({GATE: old.mapping(GATE)}), read_gate({GATE: new.mapping(GATE)})
    if before is None or after is None or before.revision != after.revision:
        return
    if after.passed > before.passed:
        text = f"step {after.passed} of {after.steps} of revision {after.revision} passed its gate"
        yield PlannedEvent(words.ROLLOUT_STEP_PASSED, text)


def _appeared(old: Previous, new: Previous, kind: str) -> Iterator[PlannedEvent]:
    """Event when a condition that is not there while all is well comes, or has another reason."""
    condition = new.condition(kind)
    if condition and condition["reason"] != old.reason(kind):
        is_request = condition["reason"] in (words.PAUSED_BY_USER, words.UNDONE)
        name = kind if new.is_true(kind) else condition["reason"]
        yield PlannedEvent(name, condition["message"], warning=not is_request)


def _scaled(old: Previous, new: Previous) -> Iterator[PlannedEvent]:
    before = old.pools()
    for (role, pool), (_, desired) in new.pools().items():
        _, was = before.get((role, pool), ("", desired))
        if was != desired:
            yield PlannedEvent(words.SCALED, f"{role} pool {pool}: from {was} to {desired} workers")


def _ready(old: Previous, new: Previous) -> Iterator[PlannedEvent]:
    was_ready, condition = old.is_true(words.READY), new.condition(words.READY)
    reason, message = condition["reason"], condition["message"]
    if new.is_true(words.READY):
        if not was_ready:
            yield PlannedEvent(words.READY, f"all is as declared: {message}")
    elif reason in _PASSING:
        if was_ready:
            yield PlannedEvent(reason, message)
    elif reason not in _REPORTED_ELSEWHERE and reason != old.reason(words.READY):
        yield PlannedEvent(reason, message, warning=True)


def _serving(old: Previous, new: Previous) -> Iterator[PlannedEvent]:
    is_serving, condition = new.is_true(words.SERVING), new.condition(words.SERVING)
    if condition and old.is_true(words.SERVING) != is_serving:
        reason = condition["reason"]
        is_fine = is_serving or reason == words.SCALED_TO_ZERO
        yield PlannedEvent(reason, condition["message"], warning=not is_fine)


def _turned(old: Previous, new: Previous, kind: str) -> Iterator[PlannedEvent]:
    """Event when a condition turns False, or its reason changes, but for that of Ready; and when it
    is True again, where users wait for that.
    """
    was, condition = old.condition(kind), new.condition(kind)
    status, reason = condition.get("status"), condition.get("reason")
    was_false = was.get("status") == "False"
    has_turned = status == "False" and not (was_false and was.get("reason") == reason)
    is_again = status == "True" and was_false and kind != words.ACCELERATORS_IN_USE
    if is_again or (has_turned and reason != new.reason(words.READY)):
        yield PlannedEvent(condition["reason"], condition["message"], warning=has_turned)
