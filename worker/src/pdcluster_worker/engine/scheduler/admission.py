"""Lets waiting requests in, first things first: one that does not fit keeps those behind it.

A request is admitted only when all its known tokens find room.  `admit`
takes that room at once, so that only decodes ever grow.
"""

from dataclasses import dataclass

from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.engine.scheduler.preemption import fails_for_size
from pdcluster_worker.engine.scheduler.queues import Queues
from pdcluster_worker.engine.scheduler.schedule import Schedule
from pdcluster_worker.engine.scheduler.start_running import start_running


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """On which a waiting request is admitted.

    whole: only if the step has budget for all its uncomputed tokens.
    limit: most of them in this step; None = the budget.
    """

    whole: bool = False
    limit: int | None = None


def admit(queues: Queues, step: Schedule, terms: AdmissionLimits) -> None:
    """Seat and schedule waiting requests while budget, seats and blocks last."""
    tables = queues.tables
    while step.budget > 0 and (request := first_waiting(queues, step)) is not None:
        reservation = tables.reservation(request, queues.block_policy.num_tokens(request))
        if reservation.num_needed > tables.pool.num_available:
            return
        if terms.whole and request.num_tokens - reservation.num_computed_tokens > step.budget:
            return
        tables.take(request, reservation)
        start(queues, request, step)
        step.add(request, terms.limit)


def first_waiting(queues: Queues, step: Schedule) -> EngineRequest | None:
    """The next request to admit, where there is one and a seat for it.

    One that can never run is given up on the way.
    """
    while queues.waiting and queues.has_free_slot:
        request = queues.waiting[0]
        if not fails_for_size(queues, request, step):
            return request
    return None


def start(queues: Queues, request: EngineRequest, step: Schedule) -> None:
    """Give the first waiting request, which has its blocks by now, its seat."""
    queues.waiting.pop(0)
    if request.status is Status.WAITING:
        request.num_cached_tokens = request.num_computed_tokens
        step.started.append(request)
    step.admitted.append(request)
    start_running(queues, request, step)
