"""Lets waiting requests in, first things first: who does not fit keeps the others behind it.

A request is admitted only when all its known tokens find room, which it takes
at once [V7], so only decodes ever grow.
"""

from pdcluster_worker.engine.acceptance import too_large
from pdcluster_worker.engine.request import Status
from pdcluster_worker.engine.scheduler.preemption import fail
from pdcluster_worker.engine.scheduler.queues import Queues
from pdcluster_worker.engine.scheduler.schedule import Schedule
from pdcluster_worker.engine.scheduler.seating import seat


def admit(queues: Queues, step: Schedule) -> None:
    """Seat and schedule waiting requests while budget, seats and blocks last."""
    while queues.waiting and step.budget > 0 and queues.has_free_seat:
        request = queues.waiting[0]
        if (reason := too_large(request.num_tokens, queues.settings)) is not None:
            fail(queues, request, reason, step)
            continue
        reservation = queues.tables.reservation(request, request.num_tokens)
        if reservation.num_needed > queues.tables.pool.num_available:
            break
        queues.waiting.pop(0)
        queues.tables.take(request, reservation)
        if request.status is Status.WAITING:
            request.num_cached_tokens = request.num_computed_tokens
            step.started.append(request)
        seat(queues, request, step)
        step.add(request)
