"""The four queue operations (LSOs) of QLM, as pure decisions: pull, evict, swap, balance."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdcluster_worker.routing.waiting_time.groups import RequestGroup
from pdcluster_worker.routing.waiting_time.virtual_queue import (
    ServiceSeconds,
    VirtualQueue,
    best_order,
    forecasts,
    num_late,
)

MAX_BATCH_SIZE = 10  # running requests beyond which nothing is pulled


@dataclass(frozen=True, slots=True)
class Move:
    """Load balancing: a group goes to the end of another worker's queue."""

    group: RequestGroup
    source: str
    target: str


def pull(
    queue: VirtualQueue,
    num_running: int,
    waiting: Sequence[int],
    max_batch_size: int = MAX_BATCH_SIZE,
) -> list[int]:
    """waiting: per group, requests not on the engine; an unloaded model blocks the rest."""
    free_slots = max(0, max_batch_size - num_running)
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
