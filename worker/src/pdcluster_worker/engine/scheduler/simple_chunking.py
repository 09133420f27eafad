"""Chunked prefills in turns: a step of chunks, then a step of decodes.

A stall is as long as one chunk instead of one prompt, but a chunk never shares
the pass over the weights with decodes, which is what `sarathi` adds.

    budget 8; a decodes, b comes with 12 prompt tokens:
    step 1  b 8        step 2  a 1        step 3  b 4        step 4  a 1, b 1
"""

from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.scheduler.admission import AdmissionLimits
from pdcluster_worker.engine.scheduler.admission import admit as admit_waiting
from pdcluster_worker.engine.scheduler.chunks import schedule_chunks
from pdcluster_worker.engine.scheduler.order import by_kind
from pdcluster_worker.engine.scheduler.preemption import decode_or_preempt
from pdcluster_worker.engine.scheduler.queues import Queues
from pdcluster_worker.engine.scheduler.schedule import Schedule
from pdcluster_worker.engine.scheduler.start_running import start_ready
from pdcluster_worker.messages.engine_settings import EngineSettings


class SimpleChunking(Queues):
    """Chunks without hybrid batches."""

    def __init__(self, settings: EngineSettings, tables: BlockTables) -> None:
        super().__init__(settings, tables)
        self._decodes_next = False

    def schedule(self, *, admit: bool = True) -> Schedule:
        """Plan the next step; see `Scheduler`.

        A turn with nothing to do falls to the other kind.
        """
        step = Schedule(self.settings.max_batched_tokens)
        start_ready(self, step)
        decodes, prefills = by_kind(self.computing)
        if self._decodes_next:
            decode_or_preempt(self, decodes, step)
        if not step.items and not step.preempted:
            schedule_chunks(self, prefills, step)
            if admit:
                admit_waiting(self, step, AdmissionLimits())
            self._decodes_next = bool(step.items)
        else:
            self._decodes_next = False
        if not step.progressed:
            decode_or_preempt(self, decodes, step)
        return step
