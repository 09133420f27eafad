"""Replicas to which one StatefulSet may drop now, and the pods to drain first. Pure. All surplus
workers drain at once; it shrinks to the highest ordinal that still has requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from pdcluster_api.plan.observed.state import PodState, WorkerRecords, WorkloadState

# Three leases: a worker without a record for so long receives no commands either, only SIGTERM
MISSING_RECORD_GRACE_SECONDS = 30.0

READY = "ready"
DRAINED = "drained"
STARTING = "starting"


class PodDrain(Enum):
    """Reason why a surplus pod is waited for."""

    FREE = "free"  # nothing: it is drained, or has nothing to drain
    DRAINS = "drains"  # its drain
    UNKNOWN = "unknown"  # an answer of etcd


@dataclass(frozen=True)
class Shrink:
    """Next step of one StatefulSet."""

    replicas: int  # that it should have now
    commands: frozenset[str] = frozenset()  # pods that get a drain command, or keep it
    draining: tuple[str, ...] = ()  # pods that are waited for
    # pods of which etcd would have to answer whether they are waited for
    unknown: tuple[str, ...] = ()
    # pods that keep serving, since none of their role that stays does
    serving: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()  # pods that go though they have not drained

    @property
    def waits(self) -> bool:
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
    """Ordinal of a pod; one that is named otherwise is never surplus."""
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
