"""Iteration-level batches, as in Orca: decodes and whole prompts in one step.

Requests join and leave at every step, but a prompt is never cut, so a long one
makes the step of all others as long; and each takes the blocks of the longest
that it can become (`ReserveMax`), so that fewer run at once and none is
preempted.

    a decodes; b and c come with 30 and 40 prompt tokens:
    step 1  a 1, b 30, c 40        step 2  a 1, b 1, c 1
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


class Orca(Queues):
    """Orca's scheduler."""

    def __init__(self, settings: EngineSettings, tables: BlockTables) -> None:
        super().__init__(settings, tables, ReserveMax(settings))

    def schedule(self, *, admit: bool = True) -> Schedule:
        """Plan the next step; see `Scheduler`."""
        step = Schedule(self.settings.max_batched_tokens)
        start_ready(self, step)
        decode_or_preempt(self, self.computing, step)
        if admit and not step.preempted:
            admit_waiting(self, step, AdmissionLimits(whole=True))
        return step
