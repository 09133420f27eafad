"""The order of requests by policy, priority, deferral and deadline."""

from collections.abc import Iterable

from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.messages.engine_settings import SchedulingPolicy


class Order:
    """Sort keys of a policy; the least goes first."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._by_priority = policy != "fcfs"
        self._preempts = policy == "preemptive"
        self._deferred: frozenset[str] = frozenset()  # groups
        self._evicts = False

    def defer(self, groups: Iterable[str], *, evicts: bool) -> None:
        """Lists in this order are to be sorted again."""
        if self._by_priority:
            self._deferred, self._evicts = frozenset(groups), evicts

    def running(self, request: EngineRequest) -> tuple[float, ...]:
        """Key of requests that hold blocks; the last of them is the victim of a preemption."""
        if not self._by_priority:
            return (request.arrival_seconds,)
        return (request.priority, request.group in self._deferred, request.arrival_seconds)

    def waiting(self, request: EngineRequest) -> tuple[float, ...]:
        """Key of the others: a preempted one goes to the front of its equals, then the earliest
        deadline of a priority (EDF); requests of deferred groups are behind the others.
        """
        never_ran, arrival = request.status is not Status.PREEMPTED, request.arrival_seconds
        if not self._by_priority:
            return (never_ran, arrival)
        is_deferred = request.group in self._deferred
        return (request.priority, is_deferred, never_ran, request.due_seconds, arrival)

    @property
    def preempts(self) -> bool:
        """Return whether any running request may make way for one that waits."""
        return self._preempts or (self._evicts and bool(self._deferred))

    def makes_way(self, running: EngineRequest, waiting: EngineRequest) -> bool:
        if self._preempts and running.priority > waiting.priority:
            return True
        return (
            self._evicts
            and running.priority >= waiting.priority
            and running.group in self._deferred
            and waiting.group not in self._deferred
        )
