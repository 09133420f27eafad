"""Choose the revision that serves, and the old workloads that stay: the steps of a roll out.

Pure, and without memory: a step follows from the revision that the Service
selects and from what is there.  Sizes and readiness are decided by the caller.

BlueGreen: serving A, made B beside it -> B is ready: the Service switches, A
stays -> the Service is seen to select B: A goes.  A goes only then, so that a
Service that could not be written never leads to workers that are gone.
Recreate: A goes -> nothing is left of A: B is made and the Service switches.
A's StatefulSets are to be seen while they have pods: the pods alone would not
do, since the watch may deliver them late.  Pods that are lost with their node are not waited for.
A role that changes within the revision (`DeclaredRevision.templates`) goes the same way alone:
BlueGreen: its old workers stay until the new ones are ready, then drain.
A third revision replaces an unfinished target; back to A drops the target.
A selector that was turned to B by hand before B was ready is turned back.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter

from pdcluster_api.plan.observed.pools import DeclaredRevision, Workloads
from pdcluster_api.plan.observed.state import (
    Observed,
    PodState,
    Previous,
    WorkloadState,
    WriteFailure,
)
from pdcluster_schema.conditions import NAME_TAKEN
from pdcluster_schema.rollout import Strategy
from pdcluster_schema.workload import WorkloadId


@dataclass(frozen=True)
class OldPods:
    num_pods: int  # pods
    first: PodState | None = None  # one of them, always the same; None = none yet


@dataclass(frozen=True)
class RolloutStep:
    serving: str  # the revision that the Service should select
    kept: tuple[WorkloadId, ...] = ()  # workloads of an older revision that stay for now
    # what must end before missing workloads of the target are made; None = no waiting
    waits_for: OldPods | None = None
    is_wide: bool = False  # the Service should select workers of every revision


def current_revision(
    observed: Observed, target: str | None = None, *, is_target_ready: bool = True
) -> str | None:
    """The revision that serves until this reconcile, by the Service, else by the last status; or
    None.

    target: the declared revision, None = it is not known; is_target_ready: its workers can take
            over
    """
    selected, decided = observed.service_revision, Previous(observed.status).text("servingRevision")
    order = (
        (decided, selected)
        if _was_edited(observed, selected, decided, target, is_target_ready=is_target_ready)
        else (selected, decided)
    )
    known = {state.id.revision for state in observed.workloads} | {
        record.revision for record in observed.records
    }
    return next((revision for revision in order if revision in known), None)


def _was_edited(
    observed: Observed,
    selected: str | None,
    decided: str | None,
    target: str | None,
    *,
    is_target_ready: bool,
) -> bool:
    """Return whether the Service was edited by hand while the serving revision of the status is
    there.  Two differences are our own: a switch to a target that is ready, of which the status
    could not be written, and one that could not be written itself, so that what served before goes
    on.
    """
    living = [state for state in observed.workloads if not state.gone]
    if target is None or not any(state.id.revision == decided for state in living):
        return False
    if selected == target:
        return not is_target_ready
    return decided != target or not any(
        state.ready for state in living if state.id.revision == selected
    )


def next_step(
    strategy: Strategy,
    declared: DeclaredRevision,
    observed: Observed,
    *,
    is_target_ready: bool,
    lost: Collection[str] = (),
) -> RolloutStep:
    """lost: pods of lost nodes, which never end"""
    target = declared.revision
    current = current_revision(observed, target, is_target_ready=is_target_ready)
    if strategy == "Recreate":
        is_there = current == target and not Workloads(observed, declared).replaced()
        return RolloutStep(serving=target) if is_there else _recreate(declared, observed, lost)
    if current == target:
        return RolloutStep(serving=target)
    return _blue_green(target, current, observed, is_target_ready=is_target_ready)


def _blue_green(
    target: str, current: str | None, observed: Observed, *, is_target_ready: bool
) -> RolloutStep:
    kept = {
        state.id for state in observed.workloads if state.id.revision == current and not state.gone
    }
    kept |= {record for record in observed.records if record.revision == current}
    if current is None or not kept:  # nothing answers now, so nothing is lost by switching
        return RolloutStep(serving=target)
    return RolloutStep(serving=target if is_target_ready else current, kept=tuple(sorted(kept)))


def _recreate(declared: DeclaredRevision, observed: Observed, lost: Collection[str]) -> RolloutStep:
    target, left = declared.revision, old_pods_of(declared, observed, lost)
    if left is None:
        return RolloutStep(serving=target)
    serves_already = any(
        state.id.revision == target and not state.gone for state in observed.workloads
    )
    before = observed.service_revision or observed.status.get("servingRevision") or target
    return RolloutStep(serving=target if serves_already else before, waits_for=left)


def old_pods_of(
    declared: DeclaredRevision, observed: Observed, lost: Collection[str] = ()
) -> OldPods | None:
    """Rest of others than are declared; None = nothing.  lost: pods of lost nodes, which never
    end
    """
    states = [
        state
        for state in observed.workloads
        if not declared.has(state.id) and not _is_lost(state, lost)
    ]
    pods = sorted((pod for state in states for pod in state.pods), key=lambda pod: pod.name)
    return (
        OldPods(sum(state.num_pods for state in states), next(iter(pods), None)) if states else None
    )


def _is_lost(state: WorkloadState, lost: Collection[str]) -> bool:
    return state.gone and bool(state.pods) and all(pod.ending.name in lost for pod in state.pods)


FIELD = "rollout"


@dataclass(frozen=True)
class Rollout:
    revision: str  # the new one
    deadline: int  # spec.rollout.progressDeadlineSeconds when it began
    ready: int = 0  # most workers of it that were ready at a time
    left: int = 0  # fewest pods of the old one that were left, where these have to end first
    # RFC 3339, when it last came forward; None = the clock stands: it cannot even begin, or it
    # waits for old workers or for etcd
    since: str | None = None
    # why it does not come forward, as it was found at the deadline; None = it does
    stalled: str | None = None
    # another one answered requests then, so this one is to have no workers
    rolled_back: bool = False


@dataclass(frozen=True)
class RolloutState:
    revision: str
    deadline: int
    ready: int
    left: int
    is_under_way: bool  # the revision is new, or another one still serves or ends
    has_fallback: bool  # another one is selected, and goes on until this one is whole
    # by ready workers of that other one, so that there is something to go back to
    is_answered: bool
    is_done: bool  # it takes over, or has
    is_whole: bool  # it has all its workers, and waits for something else
    is_blocked: bool  # another owner's object has a name that it needs, so nothing of it is made
    missing: str  # missing parts of the workers, as text
    # it can only go on once old workers have drained, or etcd answers: no fault of the new one
    is_held_up: bool = False


# Fields of a roll out, by their names in the status; what is None or False is left out
_NAMES = {
    "revision": "revision",
    "progressDeadlineSeconds": "deadline",
    "ready": "ready",
    "left": "left",
    "progressedAt": "since",
    "stalled": "stalled",
    "givenUp": "rolled_back",
}
_ROLLOUT = TypeAdapter(Rollout)


def read_rollout(status: Mapping[str, Any]) -> Rollout | None:
    """The roll out that the last status speaks of; None = none, or nothing that can be read."""
    found = status.get(FIELD)
    if not isinstance(found, Mapping):
        return None
    try:
        known = {field: found[name] for name, field in _NAMES.items() if name in found}
        rollout = _ROLLOUT.validate_python({"ready": None, "left": None, **known})
        if rollout.since is not None:
            datetime.fromisoformat(rollout.since)
        return rollout
    except ValueError:
        return None


def rollout_field(rollout: Rollout | None, *step: int) -> dict[str, Any]:
    """step: of a rolling roll out, its number and how many there are"""
    if rollout is None:
        return {}
    shown = dict(zip(("step", "steps"), step, strict=False))
    found = {name: getattr(rollout, field) for name, field in _NAMES.items()}
    left_out = {name for name, each in found.items() if each is None or each is False}
    kept = {name: each for name, each in found.items() if name not in left_out}
    return {FIELD: kept | shown}


def is_rolled_back(
    rollout: Rollout | None, revision: str, deadline: int, *, has_fallback: bool
) -> bool:
    """True if a revision is to have no workers: it was given up, and the other one is there."""
    if rollout is None or (rollout.revision, rollout.deadline) != (revision, deadline):
        return False
    return has_fallback and rollout.rolled_back


def next_rollout(before: Rollout | None, state: RolloutState, now: str) -> Rollout | None:
    """The roll out after a reconcile; None = none is under way. It progresses when more new workers
    are ready than ever before in it, or fewer old pods are left. One that stalls beside a revision
    that answers is rolled back, once, at the deadline. now: RFC 3339
    """
    revision, deadline = state.revision, state.deadline
    if is_rolled_back(before, revision, deadline, has_fallback=state.has_fallback):
        return before
    if state.is_done or not (before or state.is_under_way):
        return None
    stands = state.is_blocked or state.is_held_up
    since = None if stands else now
    fresh = Rollout(revision, deadline, state.ready, state.left, since)
    is_same = before is not None and (before.revision, before.deadline) == (revision, deadline)
    if before is None or not is_same or before.since is None:
        return fresh
    if before.rolled_back or stands:
        return fresh
    if state.ready > before.ready or state.left < before.left:
        return replace(
            fresh, ready=max(state.ready, before.ready), left=min(state.left, before.left)
        )
    if state.is_whole or _age(before.since, now) < before.deadline:
        return replace(before, stalled=None)
    is_rolled_back_now = before.stalled is None and state.has_fallback and state.is_answered
    return replace(before, stalled=state.missing, rolled_back=is_rolled_back_now)


def seconds_left(rollout: Rollout | None, now: str) -> float | None:
    """Seconds until a rollout has stalled; None = its clock stands, or it has."""
    if rollout is None or rollout.since is None or rollout.stalled is not None:
        return None
    left = rollout.deadline - _age(rollout.since, now)
    return left if left > 0 else None  # beyond the deadline something else is waited for


def _age(since: str, now: str) -> float:
    return (datetime.fromisoformat(now) - datetime.fromisoformat(since)).total_seconds()


_NEEDED = (
    "ServiceAccount",
    "Secret",
    "ConfigMap",
    "ControllerRevision",
    "NetworkPolicy",
    "Deployment",
    "StatefulSet",
    "Service",
)


def is_blocked(failures: Iterable[WriteFailure], cluster: str) -> bool:
    """True if a name is taken of an object that workers, their etcd or their clients need.

    cluster: name of the PDCluster

    >>> is_blocked([WriteFailure("Secret chat-pdc-tls", NAME_TAKEN, "exists")], "chat")
    True
    >>> is_blocked([WriteFailure("PodDisruptionBudget chat", NAME_TAKEN, "exists")], "chat")
    False
    """
    # Workers find each other by their IPs, not by the names of their headless Service.
    conflicting = [failure.object for failure in failures if failure.reason == NAME_TAKEN]
    return any(
        each.partition(" ")[0] in _NEEDED and each != f"Service {cluster}-workers"
        for each in conflicting
    )
