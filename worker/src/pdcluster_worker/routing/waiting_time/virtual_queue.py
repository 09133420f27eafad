"""Virtual queues: the request groups of one worker in the order they are served, and what an order
costs.

Two orders are offered.  `by_deadline` (EDF) is the best one while everything
can be in time.  `best_order` finds the order with the most requests in time,
exactly: groups that are in time go by deadline, so only the set of those is to
be chosen, which is every subset of a short queue.  A longer queue falls back
to EDF that gives up the longest group whenever one would be late.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from pdcluster_worker.routing.waiting_time.groups import RequestGroup, by_deadline

MAX_EXACT = 10
"""Groups of a queue whose best order is looked for among all subsets: 1024 of them, 12 ms."""

ServiceSeconds = Callable[[RequestGroup], float]
"""Seconds that a group takes alone, from now or from the end of the one before."""


@dataclass(frozen=True, slots=True)
class VirtualQueue:
    """One worker's groups, first to be served first.

    model:        what the worker has loaded.
    swap_seconds: that loading another model takes.
    """

    worker: str
    model: str
    groups: tuple[RequestGroup, ...] = ()
    swap_seconds: float = 0.0

    def with_groups(self, groups: Iterable[RequestGroup]) -> "VirtualQueue":
        """The same worker with other groups or another order."""
        return replace(self, groups=tuple(groups))

    @property
    def num_requests(self) -> int:
        """The requests of all groups."""
        return sum(group.num_requests for group in self.groups)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Time when a group would be complete, by the caller's clock."""

    group: RequestGroup
    end_seconds: float

    @property
    def is_late(self) -> bool:
        """True where that violates its deadline."""
        return self.end_seconds > self.group.due_seconds


def forecasts(queue: VirtualQueue, service: ServiceSeconds, now: float) -> list[Forecast]:
    """The end of each group: those before it, the model swaps on the way, and itself."""
    found, end, model = [], now, queue.model
    for group in queue.groups:
        if group.key.model != model:
            end += queue.swap_seconds
            model = group.key.model
        end += service(group)
        found.append(Forecast(group, end))
    return found


def num_late(queue: VirtualQueue, service: ServiceSeconds, now: float) -> int:
    """Requests whose group would be late."""
    return sum(
        forecast.group.num_requests
        for forecast in forecasts(queue, service, now)
        if forecast.is_late
    )


def best_order(queue: VirtualQueue, service: ServiceSeconds, now: float) -> list[RequestGroup]:
    """The order with the fewest late requests; among equals the least time by which groups are
    late, then EDF itself.
    """
    groups = by_deadline(queue.groups)
    if num_late(queue.with_groups(groups), service, now) == 0:
        return groups
    if len(groups) > MAX_EXACT:
        return _without_longest(queue, groups, service, now)
    known = {id(group): service(group) for group in groups}

    def cost(order: Sequence[RequestGroup]) -> tuple[int, float]:
        ends = forecasts(queue.with_groups(order), lambda group: known[id(group)], now)
        late = [forecast for forecast in ends if forecast.is_late]
        return sum(f.group.num_requests for f in late), sum(
            f.end_seconds - f.group.due_seconds for f in late
        )

    return min(_orders(groups), key=cost)


def _orders(groups: list[RequestGroup]) -> Iterable[list[RequestGroup]]:
    """Each subset by deadline, the others behind it by deadline; EDF itself first."""
    for num_behind in range(len(groups)):
        for behind in combinations(range(len(groups)), num_behind):
            late = set(behind)
            yield [group for i, group in enumerate(groups) if i not in late] + [
                groups[i] for i in behind
            ]


def _without_longest(
    queue: VirtualQueue, groups: list[RequestGroup], service: ServiceSeconds, now: float
) -> list[RequestGroup]:
    """EDF; when a group would be late, the one with the most seconds a request so far goes behind
    all (Moore and Hodgson).
    """
    kept: list[RequestGroup] = []
    behind: list[RequestGroup] = []
    for group in groups:
        kept.append(group)
        if forecasts(queue.with_groups(kept), service, now)[-1].is_late:
            behind.append(max(kept, key=lambda g: service(g) / g.num_requests))
            kept.remove(behind[-1])
    return kept + by_deadline(behind)
