"""Choose the revision that serves, and the old workloads that stay: the steps of a roll out.

Pure, and without memory: a step follows from the revision that the Service
selects and from what is there.  Sizes and readiness are decided by the caller.

BlueGreen: serving A, made B beside it -> B is ready: the Service switches, A
stays -> the Service is seen to select B: A goes.  A goes only then, so that a
Service that could not be written never leads to workers that are gone.
Recreate: A goes -> nothing is left of A: B is made and the Service switches.
A's StatefulSets are to be seen while they have pods: the pods alone would not
do, since the watch may deliver them late.  Pods that are lost with their node are not waited for.
A third revision replaces an unfinished target; back to A drops the target.
A selector that was turned to B by hand before B was ready is turned back.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from pdcluster_api.plan.observed.previous import Previous
from pdcluster_api.plan.observed.state import Observed, PodState, WorkloadState
from pdcluster_schema.workload import WorkloadId

Strategy = Literal["BlueGreen", "Recreate"]


@dataclass(frozen=True)
class OldPods:
    """Rest of older revisions."""

    num_pods: int  # pods
    first: PodState | None = None  # one of them, always the same; None = none yet


@dataclass(frozen=True)
class RolloutStep:
    """Step of one reconcile about revisions."""

    serving: str  # the revision that the Service should select
    kept: tuple[WorkloadId, ...] = ()  # workloads of an older revision that stay for now
    # what must end before missing workloads of the target are made; None = no waiting
    waits_for: OldPods | None = None


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
    target: str,
    observed: Observed,
    *,
    is_target_ready: bool,
    lost: Collection[str] = (),
) -> RolloutStep:
    """The next step towards the target.  is_target_ready: its workers can take over; lost: pods of
    lost nodes, which never end
    """
    current = current_revision(observed, target, is_target_ready=is_target_ready)
    if current == target:
        return RolloutStep(serving=target)
    if strategy == "Recreate":
        return _recreate(target, observed, lost)
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


def _recreate(target: str, observed: Observed, lost: Collection[str]) -> RolloutStep:
    left = old_pods_of(target, observed, lost)
    if left is None:
        return RolloutStep(serving=target)
    serves_already = any(
        state.id.revision == target and not state.gone for state in observed.workloads
    )
    before = observed.service_revision or observed.status.get("servingRevision") or target
    return RolloutStep(serving=target if serves_already else before, waits_for=left)


def old_pods_of(target: str, observed: Observed, lost: Collection[str] = ()) -> OldPods | None:
    """Rest of other revisions; None = nothing.  lost: pods of lost nodes, which never end"""
    states = [
        state
        for state in observed.workloads
        if state.id.revision != target and not _is_lost(state, lost)
    ]
    pods = sorted((pod for state in states for pod in state.pods), key=lambda pod: pod.name)
    return (
        OldPods(sum(state.num_pods for state in states), next(iter(pods), None)) if states else None
    )


def _is_lost(state: WorkloadState, lost: Collection[str]) -> bool:
    return state.gone and bool(state.pods) and all(pod.name in lost for pod in state.pods)
