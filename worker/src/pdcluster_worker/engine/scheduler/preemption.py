"""Takes blocks back when decodes outgrow the pool [V5]: a victim starts over, its output kept."""

import logging

from pdcluster_worker.engine.acceptance import too_large
from pdcluster_worker.engine.request import Request, Status
from pdcluster_worker.engine.scheduler.queues import Queues
from pdcluster_worker.engine.scheduler.schedule import Schedule

logger = logging.getLogger(__name__)


def decode_or_preempt(queues: Queues, requests: list[Request], step: Schedule) -> None:
    """Schedule a token of each decode, at the cost of the last in order where blocks are short."""
    for request in requests:
        if step.budget == 0:
            return
        if request.status is Status.RUNNING and grow_or_preempt(queues, request, step):
            step.add(request)


def grow_or_preempt(queues: Queues, request: Request, step: Schedule) -> bool:
    """Extend the request's blocks to its known tokens, at the cost of the last in order.

    False when the request itself was the last, or can never be held here.
    """
    while not queues.tables.grow(request, request.num_planned_tokens):
        if fails_for_size(queues, request, step):
            return False
        victim = last_in_order(queues)
        preempt(queues, victim, step)
        if victim is request:
            return False
    return True


def last_in_order(queues: Queues) -> Request:
    """The request to take blocks from, of all that hold some."""
    last = [queue[-1] for queue in (queues.running, queues.ready) if queue]
    return max(last, key=queues.order.running)


def preempt(queues: Queues, request: Request, step: Schedule) -> None:
    """Take the request's blocks and queue it again, before those that never ran."""
    # Requests preempt in the order of `running`, so the last in order is planned last.
    assert request not in step.items, f"request {request.request_id} is preempted after its turn"
    assert not request.num_in_flight_tokens, f"request {request.request_id} is preempted in the middle of a step"
    queues.remove(request)
    step.preempted.append(request)
    queues.num_preemptions += 1
    logger.info(
        "preempted request=%s blocks=%d tokens=%d",
        request.request_id,
        len(request.block_table),
        request.num_tokens,
    )
    queues.tables.release(request)
    request.status = Status.PREEMPTED
    queues.add(request)


def fails_for_size(queues: Queues, request: Request, step: Schedule) -> bool:
    """Give up a request that the whole pool could not hold; it holds nothing afterwards."""
    reason = too_large(request.num_tokens, queues.settings)
    if reason is None:
        return False
    queues.remove(request)
    queues.tables.release(request)
    step.failed.append((request, reason))
    return True
