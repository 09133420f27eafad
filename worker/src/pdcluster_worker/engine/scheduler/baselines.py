"""Schedulers of earlier systems, to compare with."""

from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.scheduler.base import Schedule, Scheduler, by_kind
from pdcluster_worker.messages.engine_settings import EngineSettings


class PrefillFirst(Scheduler):
    """vLLM 0: a step computes whole prompts or decodes, never both."""

    # a decodes; b and c come with 30 and 40 prompt tokens:
    # step 1  b 30, c 40        step 2  a 1, b 1, c 1

    def schedule(self, *, admit: bool = True) -> Schedule:
        step = Schedule(self.settings.max_batched_tokens)
        self.start_ready(step)
        decodes = self.computing
        if admit:
            self.admit(step, whole=True)
        if not step.items:
            self.decode_or_preempt(decodes, step)
        return step


class Orca(Scheduler):
    """Orca: iteration-level batches, decodes and whole prompts in one step."""

    # a decodes; b and c come with 30 and 40 prompt tokens:
    # step 1  a 1, b 30, c 40        step 2  a 1, b 1, c 1

    reserves_max = True

    def schedule(self, *, admit: bool = True) -> Schedule:
        step = Schedule(self.settings.max_batched_tokens)
        self.start_ready(step)
        self.decode_or_preempt(self.computing, step)
        if admit and not step.preempted:
            self.admit(step, whole=True)
        return step


class RequestLevel(Scheduler):
    """FasterTransformer: a batch runs to its end before the next begins."""

    # two slots; a, b and c come together, a makes 2 tokens and b 3:
    # step 1  a 30, b 40        step 2  a 1, b 1        step 3  b 1        step 4  c 20

    reserves_max = True

    def schedule(self, *, admit: bool = True) -> Schedule:
        step = Schedule(self.settings.max_batched_tokens)
        is_new_batch = not self.running
        if is_new_batch:
            self.start_ready(step)
        self.decode_or_preempt(self.computing, step)
        if is_new_batch and admit:
            self.admit(step, whole=True)
        return step


class SimpleChunking(Scheduler):
    """Chunked prefills in turns: a step of chunks, then a step of decodes."""

    # budget 8; a decodes, b comes with 12 prompt tokens:
    # step 1  b 8        step 2  a 1        step 3  b 4        step 4  a 1, b 1

    def __init__(self, settings: EngineSettings, tables: BlockTables) -> None:
        super().__init__(settings, tables)
        self._decodes_next = False

    def schedule(self, *, admit: bool = True) -> Schedule:
        """A turn with nothing to do falls to the other kind."""
        step = Schedule(self.settings.max_batched_tokens)
        self.start_ready(step)
        decodes, prefills = by_kind(self.computing)
        if self._decodes_next:
            self.decode_or_preempt(decodes, step)
        if not step.items and not step.preempted:
            self.schedule_chunks(prefills, step)
            if admit:
                self.admit(step)
            self._decodes_next = bool(step.items)
        else:
            self._decodes_next = False
        if not step.progressed:
            self.decode_or_preempt(decodes, step)
        return step
