"""Virtual queues of QLM: request groups of a worker in order of service, and its operations."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf

UNDATED = "none"
OTHER = "other"


@dataclass(frozen=True, slots=True)
class GroupKey:
    model: str
    slo_seconds: float = inf  # rounded down to the granularity; inf = none

    @property
    def name(self) -> str:
        return UNDATED if self.slo_seconds == inf else f"{self.slo_seconds:g}s"


def group_of(model: str, slo_seconds: float | None, granularity_seconds: float) -> GroupKey:
    """Round the SLO down, at least to one step of the granularity.

    >>> [group_of("chat", seconds, 100).name for seconds in (430, 20, None)]
    ['400s', '100s', 'none']
    """
    if slo_seconds is None:
        return GroupKey(model)
    steps = max(1, int(slo_seconds / granularity_seconds))
    return GroupKey(model, steps * granularity_seconds)


@dataclass(frozen=True, slots=True)
class RequestGroup:
    key: GroupKey
    due_seconds: float  # deadline by the caller's clock
    num_requests: int  # unfinished, running ones included

    def grown(self, due_seconds: float, num_requests: int = 1) -> "RequestGroup":
        return replace(
            self,
            due_seconds=min(self.due_seconds, due_seconds),
            num_requests=self.num_requests + num_requests,
        )


class Labels:
    """Bounds metric labels: the first `most` group names, all later ones are OTHER."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        if name not in self._names and len(self._names) >= self._most:
            return OTHER
        self._names.add(name)
        return name


def by_deadline(groups: Sequence[RequestGroup]) -> list[RequestGroup]:
    return sorted(groups, key=lambda group: group.due_seconds)


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


MAX_BATCH_SIZE = 10  # running requests beyond which nothing is pulled


@dataclass(frozen=True, slots=True)
class Move:
    """Load balancing: a group goes to the end of another worker's queue."""

    group: RequestGroup
    source: str
    target: str


def pull(queue: VirtualQueue, num_running: int, waiting: Sequence[int]) -> list[int]:
    """waiting: per group, requests not on the engine; an unloaded model blocks the rest."""
    free_slots = max(0, MAX_BATCH_SIZE - num_running)
    taken = []
    for group, count in zip(queue.groups, waiting, strict=True):
        if group.key.model != queue.model:
            free_slots = 0
        taken.append(min(free_slots, count))
        free_slots -= taken[-1]
    return taken


def evict(
    queue: VirtualQueue, order: Sequence[RequestGroup], running: Sequence[RequestGroup]
) -> list[RequestGroup]:
    """Running groups that the new order puts behind a group that was behind them."""
    before = {group.key: index for index, group in enumerate(queue.groups)}
    after = {group.key: index for index, group in enumerate(order)}

    def is_overtaken(group: RequestGroup) -> bool:
        return any(
            before[other] > before[group.key] and after[other] < after[group.key]
            for other in before
        )

    return [group for group in running if is_overtaken(group)]


def swap(queue: VirtualQueue, num_running: int) -> str | None:
    """The model to load; None = the loaded one, or it still runs requests."""
    if num_running or not queue.groups or queue.groups[0].key.model == queue.model:
        return None
    return queue.groups[0].key.model


def replan(queue: VirtualQueue, service: ServiceSeconds, now: float) -> list[RequestGroup]:
    """The new order of the groups, changed only if fewer requests are late: a change may evict."""
    late = num_late(queue, service, now)
    if late == 0:
        return list(queue.groups)
    best = best_order(queue, service, now)
    return best if num_late(queue.with_groups(best), service, now) < late else list(queue.groups)


def place(
    queues: Sequence[VirtualQueue], group: RequestGroup, service: ServiceSeconds, now: float
) -> str:
    """Fewest late requests, then earliest end.  Raises ValueError without queues."""
    if not queues:
        raise ValueError("no virtual queue to place a group in: ask only with at least one worker")
    return min(
        queues, key=lambda queue: _cost(_with(queue, group, service, now), group, service, now)
    ).worker


def balance(queues: Sequence[VirtualQueue], service: ServiceSeconds, now: float) -> Move | None:
    """The move that saves most late requests, or None.  A group that is being served stays."""
    best, most = None, 0
    for source in queues:
        late = num_late(source, service, now)
        for group in source.groups[1:] if late else ():
            left = source.with_groups(g for g in source.groups if g is not group)
            for target in queues:
                if target is source:
                    continue
                there = num_late(_with(target, group, service, now), service, now) - num_late(
                    target, service, now
                )
                gain = late - num_late(left, service, now) - there
                if gain > most:
                    best, most = Move(group, source.worker, target.worker), gain
    return best


def _with(
    queue: VirtualQueue, group: RequestGroup, service: ServiceSeconds, now: float
) -> VirtualQueue:
    longer = queue.with_groups((*queue.groups, group))
    return longer.with_groups(replan(longer, service, now))


def _cost(
    queue: VirtualQueue, group: RequestGroup, service: ServiceSeconds, now: float
) -> tuple[int, float]:
    ends = {id(forecast.group): forecast.end_seconds for forecast in forecasts(queue, service, now)}
    return num_late(queue, service, now), ends[id(group)]
