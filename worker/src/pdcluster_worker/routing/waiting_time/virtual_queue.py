"""Virtual queues of QLM: request groups of one worker in the order of service."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from pdcluster_worker.routing.waiting_time.groups import RequestGroup, by_deadline

MAX_EXACT = 10  # all subsets are tried: 1024 of them, 12 ms

# of a group alone, from now or from the end of the one before
ServiceSeconds = Callable[[RequestGroup], float]


@dataclass(frozen=True, slots=True)
class VirtualQueue:
    """Groups in the order of service.  model: the loaded one."""

    worker: str
    model: str
    groups: tuple[RequestGroup, ...] = ()
    swap_seconds: float = 0.0

    def with_groups(self, groups: Iterable[RequestGroup]) -> "VirtualQueue":
        return replace(self, groups=tuple(groups))

    @property
    def num_requests(self) -> int:
        return sum(group.num_requests for group in self.groups)


@dataclass(frozen=True, slots=True)
class Forecast:
    group: RequestGroup
    end_seconds: float  # by the caller's clock

    @property
    def is_late(self) -> bool:
        return self.end_seconds > self.group.due_seconds


def forecasts(queue: VirtualQueue, service: ServiceSeconds, now: float) -> list[Forecast]:
    """End of each group, with the model swaps before it."""
    found, end, model = [], now, queue.model
    for group in queue.groups:
        if group.key.model != model:
            end += queue.swap_seconds
            model = group.key.model
        end += service(group)
        found.append(Forecast(group, end))
    return found


def num_late(queue: VirtualQueue, service: ServiceSeconds, now: float) -> int:
    """Requests of the groups that would be late."""
    return sum(
        forecast.group.num_requests
        for forecast in forecasts(queue, service, now)
        if forecast.is_late
    )


def best_order(queue: VirtualQueue, service: ServiceSeconds, now: float) -> list[RequestGroup]:
    """Fewest late requests, then least lateness, then EDF."""
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
    """EDF, but whenever one is late, the group with most seconds a request goes last."""
    kept: list[RequestGroup] = []
    behind: list[RequestGroup] = []
    for group in groups:
        kept.append(group)
        if forecasts(queue.with_groups(kept), service, now)[-1].is_late:
            behind.append(max(kept, key=lambda g: service(g) / g.num_requests))
            kept.remove(behind[-1])
    return kept + by_deadline(behind)
