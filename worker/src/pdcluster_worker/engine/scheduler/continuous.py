"""Continuous batching, as in vLLM V1.

One rule for prefill and decode: a request's work is its known tokens less
the computed ones.  Running requests first (decodes, then unfinished prefills),
then, only if nothing was preempted, waiting ones, under a token budget and a
bound on running requests.

    budget 8; a decodes, b has 12 prompt tokens, c 3:
    step 1  a 1, b 7        step 2  a 1, b 5, c 2        step 3  a 1, b 1, c 1
"""

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.engine.scheduler.admission import AdmissionLimits
from pdcluster_worker.engine.scheduler.admission import admit as admit_waiting
from pdcluster_worker.engine.scheduler.chunks import schedule_chunks
from pdcluster_worker.engine.scheduler.order import by_kind
from pdcluster_worker.engine.scheduler.preemption import decode_or_preempt
from pdcluster_worker.engine.scheduler.queues import Queues
from pdcluster_worker.engine.scheduler.schedule import Schedule
from pdcluster_worker.engine.scheduler.start_running import start_ready


class Continuous(Queues):
    """The default scheduler."""

    def schedule(self, *, admit: bool = True) -> Schedule:
        """Plan the next step; see `Scheduler`."""
        step = Schedule(self.settings.max_batched_tokens)
        start_ready(self, step)
        decodes, prefills = by_kind(self.computing)
        decode_or_preempt(self, decodes, step)
        admits = admit and not step.preempted
        limit = self._limit(prefills, step, admits=admits)
        schedule_chunks(self, prefills, step, limit)
        if admits:
            whole = not self.settings.scheduler.chunked_prefill
            admit_waiting(self, step, AdmissionLimits(whole=whole, limit=limit))
        return step

    def _limit(self, prefills: list[EngineRequest], step: Schedule, *, admits: bool) -> int | None:
        """Most tokens of one prompt in this step, an equal share of the budget at least."""
        threshold = self.settings.scheduler.long_prefill_token_threshold
        if threshold == 0:
            return None
        num_slots = self.settings.max_sequences - len(self.running)
        num_waiting = min(len(self.waiting), num_slots) if admits else 0
        return max(threshold, step.budget // max(1, len(prefills) + num_waiting))
