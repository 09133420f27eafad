"""The four operations on virtual queues (LSOs) of QLM, as decisions: pull, eviction, model swap,
load balancing.

Each looks at queues and estimates and says what to do; none does it.  `replan`
is what runs at every event: it keeps an order while the estimates meet all
deadlines, and asks for another one when they do not.
"""

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

MAX_BATCH_SIZE = 10
"""Requests of a worker beyond which nothing is pulled."""


@dataclass(frozen=True, slots=True)
class Move:
    """Load balancing: a group goes to the end of another worker's queue, which is then put in
    order.
    """

    group: RequestGroup
    source: str
    target: str


def pull(
    queue: VirtualQueue,
    num_running: int,
    waiting: Sequence[int],
    max_batch_size: int = MAX_BATCH_SIZE,
) -> list[int]:
    """Count the requests of each group that go to the engine now, in the queue's order.

    waiting: of each group, requests that are not on the engine.
    Groups of another model than the loaded one wait for a swap, and all behind them.
    """
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
    """Groups with requests on the engine that another order puts behind a group that was behind
    them: their requests go back.

    queue: as it is served now; order: as it is to be served.
    """
    before = {group.key: index for index, group in enumerate(queue.groups)}
    after = {group.key: index for index, group in enumerate(order)}

    def is_overtaken(group: RequestGroup) -> bool:
        return any(
            before[other] > before[group.key] and after[other] < after[group.key]
            for other in before
        )

    return [group for group in running if is_overtaken(group)]


def swap(queue: VirtualQueue, num_running: int) -> str | None:
    """The model to load, that of the group at the head; None = the loaded one, or it still runs
    requests.
    """
    if num_running or not queue.groups or queue.groups[0].key.model == queue.model:
        return None
    return queue.groups[0].key.model


def replan(queue: VirtualQueue, service: ServiceSeconds, now: float) -> list[RequestGroup]:
    """The order of the groups from now on: that of now while all are in time, or while no other has
    fewer late requests.

    A change for less would come and go with each estimate, and every change may cost an eviction.
    """
    late = num_late(queue, service, now)
    if late == 0:
        return list(queue.groups)
    best = best_order(queue, service, now)
    return best if num_late(queue.with_groups(best), service, now) < late else list(queue.groups)


def place(
    queues: Sequence[VirtualQueue], group: RequestGroup, service: ServiceSeconds, now: float
) -> str:
    """The worker for a new group: the fewest late requests with it, then the earliest end of it.

    ValueError without queues.

    The document takes any queue; a violation would have it moved at the next event.
    """
    if not queues:
        raise ValueError("no virtual queue to place a group in: ask only with at least one worker")
    return min(
        queues, key=lambda queue: _cost(_with(queue, group, service, now), group, service, now)
    ).worker


def balance(queues: Sequence[VirtualQueue], service: ServiceSeconds, now: float) -> Move | None:
    """The one move that makes most late requests be in time; None where none does.

    A group that is served now stays: it would lose what has been computed.
    """
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
