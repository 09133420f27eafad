"""How far a StatefulSet may shrink now, and who has to be told to drain before: no worker goes while it holds a request.

Pure, and without memory: all follows from the size that is wanted, the pods that
are there, and what etcd says of them.  All workers that are too many drain at
the same time; a StatefulSet removes its highest ordinal first, so it shrinks to
the highest one that is still needed, and never below what is wanted.  When more
are wanted again, who has drained is told to serve.

Nobody drains for workers that do not serve: while none of a role that stays is
ready, those of it that are too many serve on, and who was told to drain is
told to serve again.

A size that was written by hand is put back by the same rule: where it was too
small at once, where it was too large at once as far as the new pods do not
serve yet.  What is removed as a whole because another revision has taken over
is not shrunk: its pods drain by SIGTERM, once the Service leads elsewhere.  So
do those of a new revision that is given up, to which no Service has led.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from pdcluster_operator.api.workload import Workload, WorkloadId
from pdcluster_operator.plan.state import PodState, Registry, WorkloadState

MISSING_RECORD_GRACE_SECONDS = 30.0
"""Three leases: a worker that has no record for so long does not hear commands either, and SIGTERM has to do."""

READY = "ready"
DRAINED = "drained"
STARTING = "starting"
DRAIN_POLL_SECONDS = 1.0
"""While workers drain, for etcd's watches end at the workers."""

HELD_POLL_SECONDS = 5.0
"""While etcd does not answer."""


class Fate(Enum):
    """What a pod that is too many waits for.

    FREE:    nothing: it is drained, or has nothing to drain
    DRAINS:  its drain
    UNKNOWN: an answer of etcd
    """

    FREE = "free"
    DRAINS = "drains"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Shrink:
    """What becomes of one StatefulSet.

    replicas: that it should have now
    commands: pods that are to be told to drain, or to stay told
    draining: pods that are waited for
    unknown:  pods of which etcd would have to say whether they are waited for
    serving:  pods that serve on, for none of their role that stays does
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
        """Whether anybody is waited for."""
        return bool(self.draining or self.unknown or self.serving)


@dataclass(frozen=True)
class Drain:
    """What becomes of all StatefulSets of a cluster.

    messages: who drains or is held, by role
    needs_registry: etcd has to be asked, for the answer decides on a size or on a command
    """

    workloads: tuple[Workload, ...]
    commands: frozenset[str]
    cut: tuple[str, ...]
    messages: Mapping[str, tuple[str, ...]]
    needs_registry: bool
    requeue_after_seconds: float | None


def plan_drain(
    wanted: Iterable[Workload],
    leaving: Iterable[WorkloadState],
    there: Iterable[WorkloadState],
    registry: Registry | None,
    timeout: int | None,
) -> Drain:
    """All StatefulSets as they should be now.

    wanted:   every workload that should exist, at its full size
    leaving:  workloads that are to go, but not before they have drained
    there:    what is observed
    registry: None = not known yet, and nothing that serves may go
    timeout:  seconds after which a pod that drains goes all the same; None = never
    """
    states = {state.id: state for state in there}
    going = [Workload(state.id, 0) for state in leaving]
    workloads = [*wanted, *going]
    unready = _unready_roles(workloads, states, registry)
    shrinks = {
        each.id: plan_shrink(each.replicas, states.get(each.id), registry, timeout, is_role_ready=_role(each.id) not in unready)
        for each in workloads
    }
    ending = [pod.name for state in states.values() if state.id not in shrinks for pod in state.pods]
    told = frozenset() if registry is None else registry.commands
    commands = told.intersection(ending).union(*(shrink.commands for shrink in shrinks.values()))
    waits = any(shrink.waits for shrink in shrinks.values())
    shrinking = any(not state.gone and each in shrinks and shrinks[each].replicas < state.desired for each, state in states.items())
    stale = registry is not None and registry.error is None and registry.commands != commands
    error = None if registry is None else registry.error
    return Drain(
        workloads=tuple(
            Workload(each.id, shrinks[each.id].replicas) for each in workloads if each not in going or shrinks[each.id].replicas
        ),
        commands=commands,
        cut=tuple(sorted(pod for shrink in shrinks.values() for pod in shrink.cut)),
        messages=_messages({each: shrink for each, shrink in shrinks.items() if shrink.waits}, error),
        needs_registry=waits or stale or shrinking,  # nobody goes by what etcd said some time ago
        requeue_after_seconds=None if not (waits or stale) else DRAIN_POLL_SECONDS if error is None else HELD_POLL_SECONDS,
    )


def _role(identity: WorkloadId) -> tuple[str, str]:
    """Workers of one revision find each other, of whichever pool."""
    return identity.role, identity.revision


def _unready_roles(
    workloads: Iterable[Workload], states: Mapping[WorkloadId, WorkloadState], registry: Registry | None
) -> set[tuple[str, str]]:
    """Roles of which workers are wanted, and none that stays is ready."""
    wanted = [workload for workload in workloads if workload.replicas]
    ready = [each for each in wanted if each.id in states and _has_ready(each.replicas, states[each.id], registry)]
    return {_role(each.id) for each in wanted}.difference(_role(each.id) for each in ready)


def _has_ready(wanted: int, state: WorkloadState, registry: Registry | None) -> bool:
    """Whether a pod that stays is ready, and has heard so if it was told to drain."""
    known = registry or Registry()
    told = known.commands.union(pod for pod, said in known.states.items() if said != READY)
    num_staying = 0 if state.gone else min(wanted, state.desired)
    return any(pod.ready and not pod.terminating and ordinal_of(pod) < num_staying and pod.name not in told for pod in state.pods)


def plan_shrink(
    wanted: int, state: WorkloadState | None, registry: Registry | None, timeout: int | None, *, is_role_ready: bool = True
) -> Shrink:
    """One StatefulSet on its way to the wanted size.

    is_role_ready: False = no worker of the role that stays is ready though some are wanted, and who serves goes on
    """
    if state is None:
        return Shrink(wanted)
    pods = [*state.pods, *_unseen(state, registry)]
    surplus = [(pod, ordinal) for pod in pods if (ordinal := ordinal_of(pod)) >= wanted]
    told = frozenset() if registry is None else registry.commands
    # Who was told stays told until it has ended, even if one of its name is wanted again: it would serve before it hears SIGTERM.
    ending = {pod.name for pod in pods if pod.terminating or state.gone or ordinal_of(pod) >= state.desired}
    kept = told.intersection({pod.name for pod, _ in surplus} | ending)
    if state.gone or state.desired <= wanted:
        return Shrink(wanted, commands=kept)
    living = [(pod, ordinal) for pod, ordinal in surplus if ordinal < state.desired and not pod.terminating]
    serving = {} if is_role_ready else {pod.name: ordinal for pod, ordinal in living if _may_serve(pod)}
    waiting = [
        (ordinal, pod, fate)
        for pod, ordinal in sorted(living, key=_highest_first)
        if pod.name not in serving and (fate := _fate(pod, registry)) is not Fate.FREE
    ]
    holding = [(ordinal, pod, fate) for ordinal, pod, fate in waiting if not _is_over(pod, registry, timeout)]
    replicas = max((ordinal + 1 for ordinal in [*(ordinal for ordinal, _, _ in holding), *serving.values()]), default=wanted)
    return Shrink(
        replicas=replicas,
        commands=kept.union(pod.name for _, pod, _ in waiting).difference(serving),
        draining=tuple(pod.name for _, pod, fate in holding if fate is Fate.DRAINS),
        unknown=tuple(pod.name for _, pod, fate in holding if fate is Fate.UNKNOWN),
        serving=tuple(sorted(serving)),
        cut=tuple(pod.name for ordinal, pod, _ in waiting if ordinal >= replicas),
    )


def _unseen(state: WorkloadState, registry: Registry | None) -> Iterator[PodState]:
    """Pods of which only etcd tells: the watch may be late."""
    seen = {pod.name for pod in state.pods}
    for name in () if registry is None else registry.states:
        pod = PodState(name, state.id, ready=True, terminating=False)
        if name not in seen and ordinal_of(pod) >= 0:
            yield pod


def _highest_first(pod: tuple[PodState, int]) -> int:
    return -pod[1]


def ordinal_of(pod: PodState) -> int:
    """Which of its StatefulSet's pods it is; one that is named otherwise is nobody's, and never too many."""
    number = pod.name.removeprefix(f"{pod.workload.name}-")
    return int(number) if number.isdecimal() else -1


def _may_serve(pod: PodState) -> bool:
    return pod.ready or pod.started  # who drains is not ready any more


def _fate(pod: PodState, registry: Registry | None) -> Fate:
    may_serve = _may_serve(pod)
    if registry is None or registry.error is not None:
        never_ran = not may_serve and (pod.problem is not None or not pod.node)
        return Fate.FREE if never_ran else Fate.UNKNOWN
    state = registry.states.get(pod.name)
    if state is None:
        # Etcd may have come back empty, or the lease was lost: a worker that lives registers anew.
        is_expected = may_serve and registry.odd.get(pod.name, 0.0) < MISSING_RECORD_GRACE_SECONDS
        return Fate.DRAINS if is_expected else Fate.FREE
    is_done = state == STARTING or (state == DRAINED and pod.name in registry.commands)
    return Fate.FREE if is_done else Fate.DRAINS


def _is_over(pod: PodState, registry: Registry | None, timeout: int | None) -> bool:
    return timeout is not None and registry is not None and registry.asked.get(pod.name, 0.0) >= timeout


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
        held = f"shrinking is held, for etcd does not say whether {_names(shrink.unknown)} still serves"
        yield f"{held}; it goes on when etcd answers, or after rollout.drainTimeoutSeconds"
    if shrink.serving:
        number = "1 worker serves" if len(shrink.serving) == 1 else f"{len(shrink.serving)} workers serve"
        yield f"{number} on until one of the role that stays is ready: {_names(shrink.serving)}"


def _workers(pods: tuple[str, ...]) -> str:
    return "1 worker drains" if len(pods) == 1 else f"{len(pods)} workers drain"


def _names(pods: tuple[str, ...]) -> str:
    return f"pod {pods[0]}" + (f" (and {len(pods) - 1} more)" if len(pods) > 1 else "")
