"""Request groups of one worker in the order of QLM: forecasts, and what the engines defer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain
from math import inf
from typing import Protocol

from pdcluster_schema.qos import EstimationSpec
from pdcluster_worker.messages.engine import DeferGroups
from pdcluster_worker.messages.requests import UNDATED_SECONDS
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.routing.waiting_time.request_groups import RequestGroup, forecasts, replan
from pdcluster_worker.routing.waiting_time.request_queue import Estimator, QueuedRequest
from pdcluster_worker.serving.estimation import Estimation

PLAN_SECONDS = 0.05  # least time between two plans,
PLAN_SHARE = 0.05  # and most of the time that plans take

MAX_PLANNED = 32  # groups: a plan keeps the server process from all else for about 1 ms a group


class EngineInbox(Protocol):
    @property
    def problem(self) -> str | None: ...

    def send(self, message: DeferGroups, /) -> None: ...


@dataclass(slots=True)
class GroupForecast:
    """End of one group, forecast when its latest request had come.  Seconds of the clock."""

    latest: QueuedRequest
    made_seconds: float
    end_seconds: float


class GroupOrder:
    """One per worker.  Plans when a request comes or ends, and sends changes to the engines."""

    def __init__(
        self,
        estimation: Estimation,
        metrics: Metrics,
        policy: Callable[[], EstimationSpec],
        clients: Callable[[], Iterable[EngineInbox]],
    ) -> None:
        self.deferred: frozenset[str] = frozenset()
        self._estimation = estimation
        self._metrics = metrics
        self._policy = policy
        self._clients = clients
        self._sent: dict[EngineInbox, DeferGroups] = {}
        self._forecasts: dict[str, GroupForecast] = {}
        self._next_plan = -inf

    def update(self) -> None:
        """Plan again, unless that was done a moment ago."""
        self._compare_ended()
        now = self._estimation.clock()
        if now < self._next_plan:
            return
        self._plan(now)
        took = self._estimation.clock() - now
        self._next_plan = now + max(PLAN_SECONDS, took / PLAN_SHARE)

    def _plan(self, now: float) -> None:
        groups = self._groups(now)
        deferred = replan(groups, self.deferred, now) if self._defers else frozenset[str]()
        evicts = self._policy().late_groups == "Evict"
        self._metrics.deferred_groups.inc(len(deferred - self.deferred))
        requests = self._estimation.queue.requests
        if deferred != self.deferred:
            self.deferred = deferred
            requests.defer(deferred)
        if evicts:
            for request in chain.from_iterable(map(requests.by_due_group.__getitem__, deferred)):
                request.is_timed = False
        self._send(DeferGroups(sorted(deferred), evicts and bool(deferred)))
        for group, end in forecasts(groups, deferred, now):
            self._forecast(group, now, end)

    @property
    def _defers(self) -> bool:
        return self._policy().late_groups != "Keep"

    def _groups(self, now: float) -> list[RequestGroup]:
        """The first by priority and deadline; empty while nothing can be forecast."""
        estimator, queue = self._estimation.estimator, self._estimation.queue
        if estimator is None:
            return []
        members = nsmallest(MAX_PLANNED, queue.requests.by_due_group.items(), key=_turn)
        groups = [
            _group(name, list(requests), estimator, queue.slots, now) for name, requests in members
        ]
        return [group for group in groups if group is not None] if all(groups) else []

    def _send(self, message: DeferGroups) -> None:
        """An engine that was started again has deferred nothing; one that stalls gets it later."""
        sent = {}
        for client in self._clients():
            sent[client] = self._sent.get(client, _NONE)
            if sent[client] != message and client.problem is None:
                client.send(message)
                sent[client] = message
        self._sent = sent

    def _forecast(self, group: RequestGroup, now: float, end: float) -> None:
        latest = next(reversed(self._estimation.queue.requests.by_due_group[group.name]))
        known = self._forecasts.get(group.name)
        if known is None or (
            known.latest is not latest
            and known.latest.arrival_seconds <= latest.arrival_seconds  # else that one has ended
        ):
            self._forecasts[group.name] = GroupForecast(latest, now, end)

    def _compare_ended(self) -> None:
        now, unfinished = self._estimation.clock(), self._estimation.queue.requests.by_due_group
        for name in [name for name in self._forecasts if name not in unfinished]:
            forecast = self._forecasts.pop(name)
            made = forecast.made_seconds
            self._estimation.compare(
                "group", forecast.latest.group, forecast.end_seconds - made, now - made
            )


_NONE = DeferGroups([])


def _turn(group: tuple[str, dict[QueuedRequest, None]]) -> tuple[int, float]:
    """Priority and deadline of the first of its requests: all are due in the same step."""
    first = next(iter(group[1]))
    return first.priority, first.due_seconds


def _group(
    name: str, members: list[QueuedRequest], estimator: Estimator, slots: int, now: float
) -> RequestGroup | None:
    """None while nothing was measured."""
    seconds = estimator.group_seconds(members, slots)
    if seconds is None:
        return None
    dues = [request.due_seconds for request in members]
    slo = members[0].slo_seconds
    # One that is late by as much as it was allowed has waited long enough.
    patience = UNDATED_SECONDS if slo is None else slo
    return RequestGroup(
        name,
        len(members),
        first_due_seconds=min(dues),
        last_due_seconds=inf if slo is None else max(dues),
        priority=members[0].priority,
        seconds=seconds.total,
        work_seconds=seconds.work,
        may_be_deferred=now < min(dues) + patience,
    )
