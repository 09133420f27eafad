"""Prefill first, as in vLLM 0: a step computes whole prompts or decodes, never both.

A waiting request that fits is computed at once, and the decodes wait
meanwhile: the shortest time to the first token, at the price of stalls that
are as long as the prompts.  An admission leaves a watermark of blocks.

    a decodes; b and c come with 30 and 40 prompt tokens:
    step 1  b 30, c 40        step 2  a 1, b 1, c 1
"""

from pdcluster_worker.engine.scheduler.admission import AdmissionLimits
from pdcluster_worker.engine.scheduler.admission import admit as admit_waiting
from pdcluster_worker.engine.scheduler.preemption import decode_or_preempt
from pdcluster_worker.engine.scheduler.queues import Queues
from pdcluster_worker.engine.scheduler.schedule import Schedule
from pdcluster_worker.engine.scheduler.start_running import start_ready


class PrefillFirst(Queues):
    """vLLM 0's scheduler."""

    def schedule(self, *, admit: bool = True) -> Schedule:
        """Plan the next step; see `Scheduler`."""
        step = Schedule(self.settings.max_batched_tokens)
        start_ready(self, step)
        decodes = self.computing
        if admit:
            admit_waiting(self, step, AdmissionLimits(whole=True))
        if not step.items:
            decode_or_preempt(self, decodes, step)
        return step
