"""Request-level batches, as in FasterTransformer: a batch runs to its end before the next begins.

What has ended leaves its seat empty until then, and requests that come meanwhile wait
for the longest of the batch.  Each request takes the blocks of the longest
that it can become (`ReserveMax`).

    two seats; a, b and c come together, a makes 2 tokens and b 3:
    step 1  a 30, b 40        step 2  a 1, b 1        step 3  b 1        step 4  c 20
"""

from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.scheduler.admission import AdmissionLimits
from pdcluster_worker.engine.scheduler.admission import admit as admit_waiting
from pdcluster_worker.engine.scheduler.block_policy import ReserveMax
from pdcluster_worker.engine.scheduler.preemption import decode_or_preempt
from pdcluster_worker.engine.scheduler.queues import Queues
from pdcluster_worker.engine.scheduler.schedule import Schedule
from pdcluster_worker.engine.scheduler.start_running import start_ready
from pdcluster_worker.messages.engine_settings import EngineSettings


class RequestLevel(Queues):
    """FasterTransformer's scheduler."""

    def __init__(self, settings: EngineSettings, tables: BlockTables) -> None:
        super().__init__(settings, tables, ReserveMax(settings))

    def schedule(self, *, admit: bool = True) -> Schedule:
        """Plan the next step; see `Scheduler`."""
        step = Schedule(self.settings.max_batched_tokens)
        is_new_batch = not self.running
        if is_new_batch:
            start_ready(self, step)
        decode_or_preempt(self, self.computing, step)
        if is_new_batch and admit:
            admit_waiting(self, step, AdmissionLimits(whole=True))
        return step
