"""Disruption budgets: a node drain leaves all ready workers of what serves but one. One that was
evicted counts until its successor is ready, or its time is over. The budget itself is the memory.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from pdcluster_api.plan.drain.draining import ordinal_of
from pdcluster_api.plan.observed.pools import ENDING_SECONDS
from pdcluster_api.plan.observed.state import PodState, WorkloadState
from pdcluster_schema import conditions
from pdcluster_schema.workload import Workload, WorkloadId

# Problems of a worker that will be ready when they have passed
_PASSING = frozenset({conditions.STARTING, conditions.DOWNLOADING_MODEL})

# An autoscaler of nodes brings one in a few minutes, and an image or a first crash may pass in them
PROBLEM_SECONDS = 300.0

# Time for a worker to become ready: most models are loaded in a few minutes, while a volume that
# cannot be mounted says nothing at all
UNREADY_SECONDS = 600.0


@dataclass(frozen=True)
class ReadinessDeadline:
    """The time that a worker has to end, or to become ready."""

    now: str  # RFC 3339
    deadline: int  # spec.rollout.progressDeadlineSeconds: nothing but an end is waited for longer

    def seconds_left(self, pod: PodState) -> float | None:
        """Seconds until a pod is lost, 0 or less = it is; None = it is ready, or unknown."""
        if pod.since is None or _is_at_work(pod):
            return None
        age = datetime.fromisoformat(self.now) - datetime.fromisoformat(pod.since)
        return self._bound(pod) - age.total_seconds()

    def _bound(self, pod: PodState) -> float:
        if pod.terminating:
            return ENDING_SECONDS
        has_passing = pod.problem is None or pod.problem[0] in _PASSING
        return min(self.deadline, UNREADY_SECONDS if has_passing else PROBLEM_SECONDS)


def plan_budgets(
    workloads: Iterable[Workload],
    existing: Iterable[WorkloadState],
    commands: Collection[str],
    before: Mapping[str, int],
    patience: ReadinessDeadline,
) -> dict[WorkloadId, int]:
    """Numbers of workers that have to stay ready, of each workload that serves.

    workloads: with the sizes that they should have now
    commands:  pods with a drain command
    before:    present budgets, by name
    """
    states = {state.id: state for state in existing}
    lefts = {
        pod.name: patience.seconds_left(pod) for state in states.values() for pod in state.pods
    }
    lost = {*commands, *(name for name, left in lefts.items() if left is not None and left <= 0)}
    return {
        each.id: min_available(each.replicas, states.get(each.id), lost, before.get(each.id.name))
        for each in workloads
    }


def next_loss(
    workloads: Iterable[Workload], existing: Iterable[WorkloadState], patience: ReadinessDeadline
) -> float | None:
    """Seconds until a budget changes by time alone; None = it does not."""
    states = {state.id: state for state in existing}
    counted = [_counted(each.replicas, states[each.id]) for each in workloads if each.id in states]
    lefts = [patience.seconds_left(pod) for pods in counted for pod in pods]
    return min((left for left in lefts if left is not None and left > 0), default=None)


def min_available(
    size: int, state: WorkloadState | None, lost: Collection[str], before: int | None
) -> int:
    """Number of workers that have to stay ready, of one workload.

    lost: pods whose successors, or that themselves, may never be ready: they drain, or had their
          time

    >>> from pdcluster_schema.workload import WorkloadId
    >>> chat = WorkloadId("chat", "decode", "cpu", "0a1b2c3d")
    >>> names = [f"{chat.name}-{number}" for number in range(4)]
    >>> pods = tuple(PodState(name, chat, name != names[3], False) for name in names)
    >>> state = WorkloadState(chat, 4, 4, 3, 4, pods=pods)
    >>> min_available(4, state, (), None)  # three are ready and one is new: another may go
    2
    >>> min_available(4, state, (), 3)  # four were: the one that was evicted comes again first
    3
    >>> min_available(4, state, {names[3]}, 3)  # or it has had its time
    2
    """
    if state is None:
        return 0
    pods = _counted(size, state)
    num_ready = sum(_is_at_work(pod) for pod in pods)
    num_lost = sum(not _is_at_work(pod) and pod.name in lost for pod in pods)
    if state.fault is not None:  # no more pods are created
        num_lost += max(0, size - state.num_pods)
    num_settled = max(num_ready, 0 if before is None else before + 1)
    return max(0, min(num_settled, size - num_lost) - 1)


def _counted(size: int, state: WorkloadState) -> list[PodState]:
    return [pod for pod in state.pods if 0 <= ordinal_of(pod) < size]


def _is_at_work(pod: PodState) -> bool:
    return pod.ready and not pod.terminating
