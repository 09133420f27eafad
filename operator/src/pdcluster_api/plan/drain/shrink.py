"""Replicas one StatefulSet may drop to now, and the pods to drain first: none goes while it has a
request.

Pure, and without memory: all follows from the size that is wanted, the pods that
are there, and their records in etcd.  All workers that are too many drain at
the same time; a StatefulSet removes its highest ordinal first, so it shrinks to
the highest one that is still needed, and never below what is wanted.  When more
are wanted again, drained pods serve again.

A size that was written by hand is drift, reverted by the same rule: where it was too
small at once, where it was too large at once as far as the new pods do not
serve yet.  It knows nothing of other StatefulSets: `draining` decides over all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from pdcluster_api.plan.observed.state import PodState, WorkerRecords, WorkloadState

MISSING_RECORD_GRACE_SECONDS = 30.0
"""Three leases: a worker without a record for so long receives no commands either, only SIGTERM."""

READY = "ready"
DRAINED = "drained"
STARTING = "starting"


class PodDrain(Enum):
    """Reason why a surplus pod is waited for.

    FREE:    nothing: it is drained, or has nothing to drain
    DRAINS:  its drain
    UNKNOWN: an answer of etcd
    """

    FREE = "free"
    DRAINS = "drains"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Shrink:
    """Next step of one StatefulSet.

    replicas: that it should have now
    commands: pods that get a drain command, or keep it
    draining: pods that are waited for
    unknown:  pods of which etcd would have to answer whether they are waited for
    serving:  pods that keep serving, since none of their role that stays does
    cut:      pods that go though they have not drained
    """

    replicas: int
    commands: frozenset[str] = frozenset()
    draining: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    serving: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()

    @property
    def waits(self) -> bool:
        """Return whether any pod is waited for."""
        return bool(self.draining or self.unknown or self.serving)


def plan_shrink(
    desired: int,
    state: WorkloadState | None,
    worker_records: WorkerRecords | None,
    timeout: int | None,
    *,
    is_role_ready: bool = True,
) -> Shrink:
    """One StatefulSet on its way to the wanted size.

    is_role_ready: False = no worker of the role that stays is ready though some are wanted: others
                   keep serving
    """
    if state is None:
        return Shrink(desired)
    pods = [*state.pods, *_unseen(state, worker_records)]
    surplus = [(pod, ordinal) for pod in pods if (ordinal := ordinal_of(pod)) >= desired]
    commanded = frozenset() if worker_records is None else worker_records.commands
    # A drain command stays until its pod has ended, even if one of its name is wanted again: it
    # would serve before SIGTERM.
    ending = {
        pod.name
        for pod in pods
        if pod.terminating or state.gone or ordinal_of(pod) >= state.desired
    }
    kept = commanded.intersection({pod.name for pod, _ in surplus} | ending)
    if state.gone or state.desired <= desired:
        return Shrink(desired, commands=kept)
    living = [
        (pod, ordinal)
        for pod, ordinal in surplus
        if ordinal < state.desired and not pod.terminating
    ]
    serving = (
        {} if is_role_ready else {pod.name: ordinal for pod, ordinal in living if _may_serve(pod)}
    )
    waiting = [
        (ordinal, pod, drain)
        for pod, ordinal in sorted(living, key=_highest_first)
        if pod.name not in serving
        and (drain := _pod_drain(pod, worker_records)) is not PodDrain.FREE
    ]
    holding = [
        (ordinal, pod, drain)
        for ordinal, pod, drain in waiting
        if not _is_over(pod, worker_records, timeout)
    ]
    replicas = max(
        (ordinal + 1 for ordinal in [*(ordinal for ordinal, _, _ in holding), *serving.values()]),
        default=desired,
    )
    return Shrink(
        replicas=replicas,
        commands=kept.union(pod.name for _, pod, _ in waiting).difference(serving),
        draining=tuple(pod.name for _, pod, drain in holding if drain is PodDrain.DRAINS),
        unknown=tuple(pod.name for _, pod, drain in holding if drain is PodDrain.UNKNOWN),
        serving=tuple(sorted(serving)),
        cut=tuple(pod.name for ordinal, pod, _ in waiting if ordinal >= replicas),
    )


def _unseen(state: WorkloadState, worker_records: WorkerRecords | None) -> Iterator[PodState]:
    """Pods that only etcd has: the watch may be late."""
    seen = {pod.name for pod in state.pods}
    for name in () if worker_records is None else worker_records.states:
        pod = PodState(name, state.id, ready=True, terminating=False)
        if name not in seen and ordinal_of(pod) >= 0:
            yield pod


def _highest_first(pod: tuple[PodState, int]) -> int:
    return -pod[1]


def ordinal_of(pod: PodState) -> int:
    """Ordinal of a pod in its StatefulSet; one that is named otherwise has none, and is never
    surplus.
    """
    number = pod.name.removeprefix(f"{pod.workload.name}-")
    return int(number) if number.isdecimal() else -1


def _may_serve(pod: PodState) -> bool:
    return pod.ready or pod.started  # a draining pod is not ready any more


def _pod_drain(pod: PodState, worker_records: WorkerRecords | None) -> PodDrain:
    may_serve = _may_serve(pod)
    if worker_records is None or worker_records.error is not None:
        never_ran = not may_serve and (pod.problem is not None or not pod.node)
        return PodDrain.FREE if never_ran else PodDrain.UNKNOWN
    state = worker_records.states.get(pod.name)
    if state is None:
        # Etcd may have come back empty, or the lease was lost: a worker that lives registers again.
        is_expected = (
            may_serve
            and worker_records.mismatched.get(pod.name, 0.0) < MISSING_RECORD_GRACE_SECONDS
        )
        return PodDrain.DRAINS if is_expected else PodDrain.FREE
    is_done = state == STARTING or (state == DRAINED and pod.name in worker_records.commands)
    return PodDrain.FREE if is_done else PodDrain.DRAINS


def _is_over(pod: PodState, worker_records: WorkerRecords | None, timeout: int | None) -> bool:
    return (
        timeout is not None
        and worker_records is not None
        and worker_records.requested.get(pod.name, 0.0) >= timeout
    )
