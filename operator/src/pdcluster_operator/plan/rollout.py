"""Which revision serves, and which of the old workloads stay: the steps of a roll out.

Pure, and without memory: a step follows from the revision that the Service
selects and from what is there.  Sizes and readiness are decided by the caller.

BlueGreen: serving A, made B beside it -> B is ready: the Service switches, A
stays -> the Service is seen to select B: A goes.  A goes only then, so that a
Service that could not be written never leads to workers that are gone.
Recreate: A goes -> nothing is left of A: B is made and the Service switches.
A third revision replaces an unfinished target; back to A drops the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdcluster_operator.api.workload import WorkloadId
from pdcluster_operator.plan.state import Observed, WorkloadState

Strategy = Literal["BlueGreen", "Recreate"]


@dataclass(frozen=True)
class Step:
    """What a pass does about revisions.

    serving:   the revision that the Service should select
    kept:      workloads of an older revision that stay for now
    waits_for: pods of an older revision that must end before missing workloads of the target are made; None = no waiting
    """

    serving: str
    kept: tuple[WorkloadId, ...] = ()
    waits_for: int | None = None


def current_revision(observed: Observed) -> str | None:
    """The revision that serves until this pass: the Service says, else the last status; None = nothing of either is there."""
    known = {state.id.revision for state in observed.workloads} | {record.revision for record in observed.records}
    said = (observed.service_revision, observed.status.get("servingRevision"))
    return next((revision for revision in said if revision in known), None)


def next_step(strategy: Strategy, target: str, observed: Observed, *, is_target_ready: bool) -> Step:
    """The next step towards the target.  is_target_ready: its workers can take over."""
    current = current_revision(observed)
    if current == target:
        return Step(serving=target)
    if strategy == "Recreate":
        return _recreate(target, observed)
    return _blue_green(target, current, observed, is_target_ready=is_target_ready)


def _blue_green(target: str, current: str | None, observed: Observed, *, is_target_ready: bool) -> Step:
    kept = {state.id for state in observed.workloads if state.id.revision == current and not state.gone}
    kept |= {record for record in observed.records if record.revision == current}
    if current is None or not kept:  # nothing answers now, so nothing is lost by switching
        return Step(serving=target)
    return Step(serving=target if is_target_ready else current, kept=tuple(sorted(kept)))


def _recreate(target: str, observed: Observed) -> Step:
    old = [state for state in observed.workloads if state.id.revision != target]
    if not old:
        return Step(serving=target)
    serves_already = any(state.id.revision == target and not state.gone for state in observed.workloads)
    before = observed.service_revision or observed.status.get("servingRevision") or target
    return Step(serving=target if serves_already else before, waits_for=_num_pods(old))


def _num_pods(states: Sequence[WorkloadState]) -> int:
    return sum(state.current for state in states)
