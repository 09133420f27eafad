"""Replicas each StatefulSet may drop to now, and the pods to drain first: none goes while it has a
request.

Pure, and without memory: all follows from the size that is wanted, the pods that
are there, and their records in etcd.  All workers that are too many drain at
the same time; a StatefulSet removes its highest ordinal first, so it shrinks to
the highest one that is still needed, and never below what is wanted.  When more
are wanted again, drained pods serve again.

No pod drains for workers that do not serve: while none of a role that stays is
ready, the surplus ones of the role keep serving, and those with a drain command
serve again.

A size that was written by hand is drift, reverted by the same rule: where it was too
small at once, where it was too large at once as far as the new pods do not
serve yet.  What is removed as a whole because another revision has taken over
is not shrunk: its pods drain by SIGTERM, once the Service leads elsewhere.  So
do those of a new revision that is given up, to which no Service has led.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from pdcluster_api.plan.observed.state import PodState, WorkerRecords, WorkloadState
from pdcluster_api.schema.workload import Workload, WorkloadId

MISSING_RECORD_GRACE_SECONDS = 30.0
"""Three leases: a worker without a record for so long receives no commands either, only SIGTERM."""

READY = "ready"
DRAINED = "drained"
STARTING = "starting"
DRAIN_POLL_SECONDS = 1.0
"""Seconds between looks while workers drain: etcd's watches end at the workers."""

HELD_POLL_SECONDS = 5.0
"""While etcd does not answer."""


class Fate(Enum):
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


@dataclass(frozen=True)
class Drain:
    """Next steps of all StatefulSets of a cluster.

    messages: pods that drain or are held, by role
    needs_worker_records: etcd has to be read, since the answer decides on a size or on a command
    """

    workloads: tuple[Workload, ...]
    commands: frozenset[str]
    cut: tuple[str, ...]
    messages: Mapping[str, tuple[str, ...]]
    needs_worker_records: bool
    requeue_after_seconds: float | None


def plan_drain(
    wanted: Iterable[Workload],
    leaving: Iterable[WorkloadState],
    there: Iterable[WorkloadState],
    worker_records: WorkerRecords | None,
    timeout: int | None,
) -> Drain:
    """All StatefulSets as they should be now.

    wanted:   every workload that should exist, at its full size
    leaving:  workloads that are to go, but not before they have drained
    there:    what is observed
    worker_records: None = not known yet, and nothing that serves may go
    timeout:  seconds after which a pod that drains goes all the same; None = never
    """
    states = {state.id: state for state in there}
    going = [Workload(state.id, 0) for state in leaving]
    workloads = [*wanted, *going]
    unready = _unready_roles(workloads, states, worker_records)
    shrinks = {
        each.id: plan_shrink(each.replicas, states.get(each.id), worker_records, timeout, is_role_ready=_role(each.id) not in unready)
        for each in workloads
    }
    ending = [pod.name for state in states.values() if state.id not in shrinks for pod in state.pods]
    commanded = frozenset() if worker_records is None else worker_records.commands
    commands = commanded.intersection(ending).union(*(shrink.commands for shrink in shrinks.values()))
    waits = any(shrink.waits for shrink in shrinks.values())
    shrinking = any(not state.gone and each in shrinks and shrinks[each].replicas < state.desired for each, state in states.items())
    stale = worker_records is not None and worker_records.error is None and worker_records.commands != commands
    error = None if worker_records is None else worker_records.error
    return Drain(
        workloads=tuple(
            Workload(each.id, shrinks[each.id].replicas) for each in workloads if each not in going or shrinks[each.id].replicas
        ),
        commands=commands,
        cut=tuple(sorted(pod for shrink in shrinks.values() for pod in shrink.cut)),
        messages=_messages({each: shrink for each, shrink in shrinks.items() if shrink.waits}, error),
        needs_worker_records=waits or stale or shrinking,  # an old read is no ground to remove a pod
        requeue_after_seconds=None if not (waits or stale) else DRAIN_POLL_SECONDS if error is None else HELD_POLL_SECONDS,
    )


def _role(identity: WorkloadId) -> tuple[str, str]:
    """Workers of one revision find each other, of whichever pool."""
    return identity.role, identity.revision


def _unready_roles(
    workloads: Iterable[Workload], states: Mapping[WorkloadId, WorkloadState], worker_records: WorkerRecords | None
) -> set[tuple[str, str]]:
    """Roles of which workers are wanted, and none that stays is ready."""
    wanted = [workload for workload in workloads if workload.replicas]
    ready = [each for each in wanted if each.id in states and _has_ready(each.replicas, states[each.id], worker_records)]
    return {_role(each.id) for each in wanted}.difference(_role(each.id) for each in ready)


def _has_ready(wanted: int, state: WorkloadState, worker_records: WorkerRecords | None) -> bool:
    """Return whether a pod that stays is ready, and has received the end of its drain command."""
    known = worker_records or WorkerRecords()
    commanded = known.commands.union(pod for pod, said in known.states.items() if said != READY)
    num_staying = 0 if state.gone else min(wanted, state.desired)
    return any(pod.ready and not pod.terminating and ordinal_of(pod) < num_staying and pod.name not in commanded for pod in state.pods)


def plan_shrink(
    wanted: int, state: WorkloadState | None, worker_records: WorkerRecords | None, timeout: int | None, *, is_role_ready: bool = True
) -> Shrink:
    """One StatefulSet on its way to the wanted size.

    is_role_ready: False = no worker of the role that stays is ready though some are wanted: others
                   keep serving
    """
    if state is None:
        return Shrink(wanted)
    pods = [*state.pods, *_unseen(state, worker_records)]
    surplus = [(pod, ordinal) for pod in pods if (ordinal := ordinal_of(pod)) >= wanted]
    commanded = frozenset() if worker_records is None else worker_records.commands
    # A drain command stays until its pod has ended, even if one of its name is wanted again: it would serve before SIGTERM.
    ending = {pod.name for pod in pods if pod.terminating or state.gone or ordinal_of(pod) >= state.desired}
    kept = commanded.intersection({pod.name for pod, _ in surplus} | ending)
    if state.gone or state.desired <= wanted:
        return Shrink(wanted, commands=kept)
    living = [(pod, ordinal) for pod, ordinal in surplus if ordinal < state.desired and not pod.terminating]
    serving = {} if is_role_ready else {pod.name: ordinal for pod, ordinal in living if _may_serve(pod)}
    waiting = [
        (ordinal, pod, fate)
        for pod, ordinal in sorted(living, key=_highest_first)
        if pod.name not in serving and (fate := _fate(pod, worker_records)) is not Fate.FREE
    ]
    holding = [(ordinal, pod, fate) for ordinal, pod, fate in waiting if not _is_over(pod, worker_records, timeout)]
    replicas = max((ordinal + 1 for ordinal in [*(ordinal for ordinal, _, _ in holding), *serving.values()]), default=wanted)
    return Shrink(
        replicas=replicas,
        commands=kept.union(pod.name for _, pod, _ in waiting).difference(serving),
        draining=tuple(pod.name for _, pod, fate in holding if fate is Fate.DRAINS),
        unknown=tuple(pod.name for _, pod, fate in holding if fate is Fate.UNKNOWN),
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


def _fate(pod: PodState, worker_records: WorkerRecords | None) -> Fate:
    may_serve = _may_serve(pod)
    if worker_records is None or worker_records.error is not None:
        never_ran = not may_serve and (pod.problem is not None or not pod.node)
        return Fate.FREE if never_ran else Fate.UNKNOWN
    state = worker_records.states.get(pod.name)
    if state is None:
        # Etcd may have come back empty, or the lease was lost: a worker that lives registers again.
        is_expected = may_serve and worker_records.odd.get(pod.name, 0.0) < MISSING_RECORD_GRACE_SECONDS
        return Fate.DRAINS if is_expected else Fate.FREE
    is_done = state == STARTING or (state == DRAINED and pod.name in worker_records.commands)
    return Fate.FREE if is_done else Fate.DRAINS


def _is_over(pod: PodState, worker_records: WorkerRecords | None, timeout: int | None) -> bool:
    return timeout is not None and worker_records is not None and worker_records.asked.get(pod.name, 0.0) >= timeout


def _messages(shrinks: Mapping[WorkloadId, Shrink], error: str | None) -> dict[str, tuple[str, ...]]:
    """By role, in the order of the workloads."""
    found: dict[str, tuple[str, ...]] = {}
    for identity, shrink in shrinks.items():
        role, pool = identity.role, identity.pool
        found[role] = (*found.get(role, ()), *(f"pool {pool}: {said}" for said in _said(shrink, error)))
    return found


def _said(shrink: Shrink, error: str | None) -> Iterator[str]:
    if shrink.draining:
        yield f"{_workers(shrink.draining)} before the pool shrinks: {_names(shrink.draining)}"
    if shrink.unknown and error is not None:
        held = f"shrinking is held: etcd does not say whether {_names(shrink.unknown)} still serves"
        yield f"{held}; it goes on when etcd answers, or after rollout.drainTimeoutSeconds"
    if shrink.serving:
        number = "1 worker keeps" if len(shrink.serving) == 1 else f"{len(shrink.serving)} workers keep"
        yield f"{number} serving until one of the role that stays is ready: {_names(shrink.serving)}"


def _workers(pods: tuple[str, ...]) -> str:
    return "1 worker drains" if len(pods) == 1 else f"{len(pods)} workers drain"


def _names(pods: tuple[str, ...]) -> str:
    return f"pod {pods[0]}" + (f" (and {len(pods) - 1} more)" if len(pods) > 1 else "")
