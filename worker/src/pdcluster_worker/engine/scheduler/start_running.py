"""Gives seats: a request with a seat runs until it ends, is preempted or leaves to send its KV."""

from bisect import insort_right

from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.engine.scheduler.queues import Queues
from pdcluster_worker.engine.scheduler.schedule import Schedule


def start_ready(queues: Queues, step: Schedule) -> None:
    """Seat requests that hold received KV, as far as there are seats."""
    while queues.ready and queues.has_free_slot:
        start_running(queues, queues.ready.pop(0), step)


def start_running(queues: Queues, request: EngineRequest, step: Schedule) -> None:
    """Let a request run that holds its blocks and stands in no queue."""
    request.status = Status.RUNNING
    insort_right(queues.running, request, key=queues.order.running)
    step.newly_running.append(request)
