"""Takes blocks back when decodes outgrow the pool: a victim starts over, its output kept."""

from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.engine.scheduler.queues import Queues
from pdcluster_worker.engine.scheduler.schedule import Schedule
from pdcluster_worker.engine.validation import too_large


def decode_or_preempt(queues: Queues, requests: list[EngineRequest], step: Schedule) -> None:
    """Schedule a token of each decode, at the cost of the last in order where blocks are short."""
    for request in requests:
        if step.budget == 0:
            return
        if request.status is Status.RUNNING and grow_or_preempt(queues, request, step):
            step.add(request)


def grow_or_preempt(queues: Queues, request: EngineRequest, step: Schedule) -> bool:
    """Extend the request's blocks to its known tokens, at the cost of the last in order.

    False when the request itself was the last, or can never be held here.
    """
    while not queues.tables.grow(request, request.num_planned_tokens):
        if fails_for_size(queues, request, step):
            return False
        victim = queues.last_in_order
        preempt(queues, victim, step)
        if victim is request:
            return False
    return True


def preempt(queues: Queues, request: EngineRequest, step: Schedule) -> None:
    """Take the request's blocks for another one, in the middle of a plan."""
    # Requests preempt in the order of `running`, so the last in order is planned last.
    assert request not in step.items, f"request {request.request_id} is preempted after its turn"
    assert not request.num_in_flight_tokens, (
        f"request {request.request_id} is preempted in the middle of a step"
    )
    step.preempted.append(request)
    queues.requeue(request)


def fails_for_size(queues: Queues, request: EngineRequest, step: Schedule) -> bool:
    """Give up a request that the whole pool could not hold; it holds nothing afterwards."""
    reason = too_large(request.num_tokens, queues.settings)
    if reason is None:
        return False
    queues.remove(request)
    queues.tables.release(request)
    step.failed.append((request, reason))
    return True
