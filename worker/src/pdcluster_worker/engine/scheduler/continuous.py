"""Continuous batching, as in vLLM V1.

One rule for prefill and decode [V1]: a request's work is its known tokens less
the computed ones.  Running requests first (decodes, then unfinished prefills),
then, only if nothing was preempted, waiting ones, under a token budget and a
bound on running requests [V2].
"""

from pdcluster_worker.engine.request import Request, Status
from pdcluster_worker.engine.scheduler.admission import admit as admit_waiting
from pdcluster_worker.engine.scheduler.order import decodes_first
from pdcluster_worker.engine.scheduler.preemption import grow_or_preempt
from pdcluster_worker.engine.scheduler.queues import Queues
from pdcluster_worker.engine.scheduler.schedule import Schedule
from pdcluster_worker.engine.scheduler.seating import seat_ready


class Continuous(Queues):
    """The default scheduler."""

    def schedule(self, *, admit: bool = True) -> Schedule:
        """Plan the next step; see `Scheduler`."""
        step = Schedule(self.settings.max_batched_tokens)
        seat_ready(self, step)
        for request in decodes_first(self.running):
            if step.budget == 0:
                break
            if request.status is Status.RUNNING:
                self._schedule_running(request, step)
        if admit and not step.preempted:
            admit_waiting(self, step)
        return step

    def _schedule_running(self, request: Request, step: Schedule) -> None:
        end = min(len(request.tokens), request.num_computed_tokens + step.budget)
        if grow_or_preempt(self, request, end, step):
            step.add(request)
