"""Schedulers by name; Continuous is the default, those below it are earlier systems'."""

from collections.abc import Callable, Mapping

from pdcluster_schema.ports import SchedulerName
from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.engine.scheduler.base import Schedule, Scheduler, by_kind
from pdcluster_worker.engine.scheduler.sarathi import Sarathi
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.messages.engine_settings import EngineSettings, wrong_sizes


class Continuous(Scheduler):
    """Continuous batching, as in vLLM V1: one rule for prefill and decode."""

    # A request's work is its known tokens less the computed ones.  Running requests go first
    # (decodes, then unfinished prefills), then waiting ones unless something was preempted.
    #
    # budget 8; a decodes, b has 12 prompt tokens, c 3:
    # step 1  a 1, b 7        step 2  a 1, b 5, c 2        step 3  a 1, b 1, c 1

    def schedule(self, *, admit: bool = True) -> Schedule:
        step = Schedule(self.settings.max_batched_tokens)
        self.start_ready(step)
        decodes, prefills = by_kind(self.computing)
        self.decode_or_preempt(decodes, step)
        admits = admit and not step.preempted
        limit = self._limit(prefills, step, admits=admits)
        self.schedule_chunks(prefills, step, limit)
        if admits:
            self.admit(step, whole=not self.settings.scheduler.chunked_prefill, limit=limit)
        return step

    def _limit(self, prefills: list[EngineRequest], step: Schedule, *, admits: bool) -> int | None:
        threshold = self.settings.scheduler.long_prefill_token_threshold
        if threshold == 0:
            return None
        num_slots = self.settings.max_sequences - len(self.running)
        num_waiting = min(len(self.waiting), num_slots) if admits else 0
        return max(threshold, step.budget // max(1, len(prefills) + num_waiting))


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


SCHEDULERS: Mapping[SchedulerName, Callable[[EngineSettings, BlockTables], Scheduler]] = {
    "continuous": Continuous,
    "sarathi": Sarathi,
    "prefill-first": PrefillFirst,
    "orca": Orca,
    "request-level": RequestLevel,
    "simple-chunking": SimpleChunking,
}


def make_scheduler(settings: EngineSettings, tables: BlockTables) -> Scheduler:
    """Raises ConfigError for an unknown name, and for sizes that it cannot work with."""
    own = settings.scheduler
    if own.name not in SCHEDULERS:
        known = ", ".join(SCHEDULERS)
        raise ConfigError(f"engine.scheduler: {own.name!r} is no scheduler: use one of {known}")
    if wrong := wrong_sizes(own, settings.max_batched_tokens, settings.max_model_len):
        raise ConfigError(f"engine.scheduler: {wrong}")
    return SCHEDULERS[own.name](settings, tables)
