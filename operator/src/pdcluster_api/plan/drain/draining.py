"""StatefulSets on their way to the desired size. Pure. All surplus workers of one drain at once; it
shrinks to the highest ordinal that still has requests. A replaced revision is not shrunk: its pods
drain by SIGTERM.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from pdcluster_api.plan.observed.state import PodState, WorkerRecords, WorkloadState
from pdcluster_schema.text import and_more
from pdcluster_schema.workload import Workload, WorkloadId

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
        for pod, ordinal in sorted(living, key=lambda each: -each[1])
        if pod.name not in serving
        and (drain := _pod_drain(pod, worker_records)) is not PodDrain.FREE
    ]
    holding = [each for each in waiting if not _is_over(each[1], worker_records, timeout)]
    ordinals = [*(ordinal for ordinal, _, _ in holding), *serving.values()]
    replicas = max(ordinals, default=desired - 1) + 1
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


def ordinal_of(pod: PodState) -> int:
    """Ordinal of a worker, by its pod or, of several, that of its leader (`GroupId.leader_pod`);
    one that is named otherwise is never surplus.
    """
    number = pod.name.removeprefix(f"{pod.workload.name}-").removesuffix("-0")
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


# Seconds between looks while workers drain: etcd's watches end at the workers
DRAIN_POLL_SECONDS = 1.0

HELD_POLL_SECONDS = 5.0  # While etcd does not answer


@dataclass(frozen=True)
class DrainPlan:
    workloads: tuple[Workload, ...]
    commands: frozenset[str]
    graces: Mapping[str, int]  # of ending pods that have less time than usual; each has a command
    cut: tuple[str, ...]
    messages: Mapping[str, tuple[str, ...]]  # pods that drain or are held, by role
    # etcd has to be read, since the answer decides on a size or on a command
    needs_worker_records: bool
    requeue_after_seconds: float | None


def plan_drain(
    desired: Iterable[Workload],
    leaving: Iterable[WorkloadState],
    existing: Iterable[WorkloadState],
    worker_records: WorkerRecords | None,
    timeout: int | None,
) -> DrainPlan:
    """All StatefulSets as they should be now. While no worker of a role that stays is ready,
    surplus ones keep serving.

    desired:        every workload that should exist, at its full size.
    leaving:        workloads that are to go, but not before they have drained.
    worker_records: None = not known yet, and nothing that serves may go.
    timeout:        seconds after which a pod that drains goes all the same; None = never.
    """
    states = {state.id: state for state in existing}
    going = [Workload(state.id, 0) for state in leaving]
    workloads = [*desired, *going]
    unready = _unready_roles(workloads, states, worker_records)
    shrinks = {
        each.id: plan_shrink(
            each.replicas,
            states.get(each.id),
            worker_records,
            timeout,
            is_role_ready=_role(each.id) not in unready,
        )
        for each in workloads
    }
    commanded = frozenset() if worker_records is None else worker_records.commands
    error = None if worker_records is None else worker_records.error
    ended = [state for each, state in states.items() if each not in shrinks]
    kept = commanded.intersection(pod.name for state in ended for pod in state.pods)
    graces = _graces(existing)
    commands = kept.union(*(shrink.commands for shrink in shrinks.values()), graces)
    is_stale = worker_records is not None and error is None and commanded != commands
    is_waiting = is_stale or any(shrink.waits for shrink in shrinks.values())
    is_shrinking = any(
        not state.gone and each in shrinks and shrinks[each].replicas < state.desired
        for each, state in states.items()
    )
    poll_seconds = DRAIN_POLL_SECONDS if error is None else HELD_POLL_SECONDS
    return DrainPlan(
        workloads=tuple(
            Workload(each.id, shrinks[each.id].replicas)
            for each in workloads
            if each not in going or shrinks[each.id].replicas
        ),
        commands=commands,
        graces=graces,
        cut=tuple(sorted(pod for shrink in shrinks.values() for pod in shrink.cut)),
        messages=_messages(shrinks, error),
        # An old read is no ground to remove a pod.
        needs_worker_records=is_waiting or is_shrinking,
        requeue_after_seconds=poll_seconds if is_waiting else None,
    )


def _graces(existing: Iterable[WorkloadState]) -> dict[str, int]:
    pods = (pod for state in existing for pod in state.pods if pod.terminating)
    return {pod.name: pod.grace_seconds for pod in pods if pod.grace_seconds is not None}


def _role(identity: WorkloadId) -> tuple[str, str]:
    """Workers of one revision find each other, of whichever pool."""
    return identity.role, identity.revision


def _unready_roles(
    workloads: Iterable[Workload],
    states: Mapping[WorkloadId, WorkloadState],
    worker_records: WorkerRecords | None,
) -> set[tuple[str, str]]:
    desired = [workload for workload in workloads if workload.replicas]
    ready = [
        each
        for each in desired
        if each.id in states and _has_ready(each.replicas, states[each.id], worker_records)
    ]
    return {_role(each.id) for each in desired}.difference(_role(each.id) for each in ready)


def _has_ready(desired: int, state: WorkloadState, worker_records: WorkerRecords | None) -> bool:
    """Return whether a pod that stays is ready, and has received the end of its drain command."""
    known = worker_records or WorkerRecords()
    commanded = known.commands.union(
        pod for pod, reported in known.states.items() if reported != READY
    )
    num_staying = 0 if state.gone else min(desired, state.desired)
    return any(
        pod.ready
        and not pod.terminating
        and (ordinal_of(pod) < num_staying or pod in state.guests)
        and pod.name not in commanded
        for pod in state.serving_pods
    )


def _messages(
    shrinks: Mapping[WorkloadId, Shrink], error: str | None
) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for each, shrink in shrinks.items():
        texts = (f"pool {each.pool}: {text}" for text in _describe(shrink, error))
        if shrink.waits:
            found[each.role] = (*found.get(each.role, ()), *texts)
    return found


def _describe(shrink: Shrink, error: str | None) -> Iterator[str]:
    if shrink.draining:
        drain = _counted(shrink.draining, "drains", "drain")
        yield f"{drain} before the pool shrinks: {_names(shrink.draining)}"
    if shrink.unknown and error is not None:
        held = f"shrinking is held: etcd does not say whether {_names(shrink.unknown)} still serves"
        yield f"{held}; it goes on when etcd answers, or after rollout.drainTimeoutSeconds"
    if shrink.serving:
        keep = _counted(shrink.serving, "keeps", "keep")
        until = "serving until one of the role that stays is ready"
        yield f"{keep} {until}: {_names(shrink.serving)}"


def _counted(pods: tuple[str, ...], one: str, several: str) -> str:
    return f"1 worker {one}" if len(pods) == 1 else f"{len(pods)} workers {several}"


def _names(pods: tuple[str, ...]) -> str:
    return f"pod {pods[0]}{and_more(len(pods))}"
