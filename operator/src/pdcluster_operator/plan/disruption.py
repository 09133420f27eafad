"""How many workers of what serves a drain of nodes has to leave ready: one less than are there, and no more than can be.

Pure.  It is a number of pods and no share of the wanted ones: workers that are
still to come, be it for a roll out, for a scale up or since no node takes them,
are none that an eviction could take.  One that was evicted counts until its
successor is ready, so that the next one waits; not where nobody knows whether
it ever will be, for then the drain would wait for ever.
The memory of how many there were is the budget itself.
"""

from collections.abc import Collection, Iterable, Mapping

from pdcluster_operator.api import conditions
from pdcluster_operator.api.workload import Workload, WorkloadId
from pdcluster_operator.plan.drain import ordinal_of
from pdcluster_operator.plan.state import PodState, WorkloadState

_PASSING = frozenset({conditions.STARTING, conditions.DOWNLOADING_MODEL})
"""Problems of a worker that will be ready when they have passed."""


def plan_budgets(
    workloads: Iterable[Workload], there: Iterable[WorkloadState], commands: Collection[str], before: Mapping[str, int]
) -> dict[WorkloadId, int]:
    """Of each workload that serves, how many of its workers have to stay ready.

    workloads: with the sizes that they should have now
    commands:  pods that are told to drain
    before:    what each budget says now, by its name
    """
    states = {state.id: state for state in there}
    return {each.id: min_available(each.replicas, states.get(each.id), commands, before.get(each.id.name)) for each in workloads}


def min_available(size: int, state: WorkloadState | None, commands: Collection[str], before: int | None) -> int:
    """Of one workload.

    >>> from pdcluster_operator.api.workload import WorkloadId
    >>> chat = WorkloadId("chat", "decode", "cpu", "0a1b2c3d")
    >>> pods = tuple(PodState(f"{chat.name}-{number}", chat, ready=number < 3, terminating=False) for number in range(4))
    >>> state = WorkloadState(chat, 4, 4, 3, 4, pods=pods)
    >>> min_available(4, state, (), None)  # three are ready and one is new: another may go
    2
    >>> min_available(4, state, (), 3)  # four were: the one that was evicted comes again first
    3
    """
    if state is None:
        return 0
    pods = [pod for pod in state.pods if 0 <= ordinal_of(pod) < size and not pod.terminating]
    num_ready = sum(pod.ready for pod in pods)
    num_lost = sum(not pod.ready and _is_lost(pod, commands) for pod in pods)
    if state.fault is not None:  # no more pods are created
        num_lost += max(0, size - state.num_pods)
    num_settled = max(num_ready, 0 if before is None else before + 1)
    return max(0, min(num_settled, size - num_lost) - 1)


def _is_lost(pod: PodState, commands: Collection[str]) -> bool:
    """Whether nobody knows that a worker will be ready: it fails, no node takes it, or it drains."""
    return pod.name in commands or (pod.problem is not None and pod.problem[0] not in _PASSING)
