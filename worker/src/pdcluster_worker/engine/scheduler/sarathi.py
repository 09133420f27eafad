"""Stall-free batches, as in Sarathi-Serve: every decode in every step, chunks in what is left.

Decodes come first in the budget; the chunks of unfinished prompts fill it,
then those of new ones.  A prompt is admitted only when all its blocks could be
had above a watermark, but takes them chunk by chunk: where decodes have
used them up meanwhile, its next chunk is cut to the free blocks, or is none.
Where even a decode finds no block, an unfinished prefill loses its own;
where none runs, the decode sits out while others go on, which free theirs.
With a target for the time between two tokens, the budget follows the time of
the last step (`ChunkBudget`).

    budget 8; a and b decode, c has 12 prompt tokens, d 3:
    step 1  a 1, b 1, c 6        step 2  a 1, b 1, c 6        step 3  a 1, b 1, c 1, d 3
"""

from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.engine.scheduler.admission import first_waiting, start
from pdcluster_worker.engine.scheduler.chunks import ChunkBudget, StageSizes
from pdcluster_worker.engine.scheduler.order import by_kind, is_decode, num_uncomputed
from pdcluster_worker.engine.scheduler.preemption import (
    fails_for_size,
    grow_or_preempt,
    preempt,
)
from pdcluster_worker.engine.scheduler.queues import Queues
from pdcluster_worker.engine.scheduler.schedule import Schedule
from pdcluster_worker.engine.scheduler.start_running import start_ready
from pdcluster_worker.messages.engine_settings import EngineSettings


class Sarathi(Queues):
    """Sarathi-Serve's scheduler."""

    def __init__(self, settings: EngineSettings, tables: BlockTables) -> None:
        super().__init__(settings, tables)
        own = settings.scheduler
        self._least_chunk = settings.block_size
        self._budget = ChunkBudget(
            settings.max_batched_tokens, self._least_chunk, own.tbt_slo_seconds
        )
        self._stages = StageSizes(own.chunk_schedule) if own.chunk_schedule else None

    @property
    def num_reserved_blocks(self) -> int:
        """As of all schedulers, and what is promised to unfinished prefills."""
        _, prefills = by_kind(self.running)
        return super().num_reserved_blocks + self._num_promised(prefills)

    def completed(self, num_tokens: int, seconds: float) -> None:
        """Adjust the next step's budget."""
        self._budget.adjust(num_tokens, seconds)

    def schedule(self, *, admit: bool = True) -> Schedule:
        """Plan the next step; see `Scheduler`."""
        step = Schedule(self.settings.max_batched_tokens)
        start_ready(self, step)
        decodes, prefills = by_kind(self.computing)
        self._schedule_decodes(decodes, step)
        # However many decodes there are, prompts go on.
        target = max(self._budget.num_tokens, len(step.items) + self._least_chunk)
        step.budget = min(step.budget, target - len(step.items))
        prefills = [request for request in prefills if request.status is Status.RUNNING]
        for request in prefills:
            self._schedule_chunk(request, step)
        if prefills and not step.progressed:
            self._free_blocks(prefills[0], step)
        if admit and not step.preempted:
            self._admit(prefills, step)
        return step

    def _schedule_decodes(self, decodes: list[EngineRequest], step: Schedule) -> None:
        short: list[EngineRequest] = []
        for request in decodes:
            if self.tables.grow(request, request.num_planned_tokens):
                step.add(request)
            else:
                short.append(request)
        for request in short:
            if request.status is Status.RUNNING and self._finds_block(request, step):
                step.add(request)

    def _finds_block(self, request: EngineRequest, step: Schedule) -> bool:
        while not self.tables.grow(request, request.num_planned_tokens):
            if fails_for_size(self, request, step):
                return False
            victim = self.last_in_order
            if is_decode(victim) and step.items:
                return False  # it sits out: a block comes free when one of the others ends
            preempt(self, victim, step)
            if victim is request:
                return False
        return True

    def _schedule_chunk(self, request: EngineRequest, step: Schedule) -> None:
        """A chunk of an unfinished prefill, cut to the free blocks."""
        computed = request.num_scheduled_tokens
        num_blocks = len(request.block_table) + self.tables.num_available_to(request)
        free = num_blocks * self.settings.block_size - computed
        size = min(num_uncomputed(request), self._limit(computed, step), free)
        if size > 0:
            self.tables.grow(request, computed + size)
            step.add(request, size)

    def _limit(self, num_computed_tokens: int, step: Schedule) -> int:
        if self._stages is None:
            return step.budget
        num_batched = sum(item.num_tokens for item in step.items.values())
        left = self._stages.at(num_computed_tokens) - num_batched
        return min(step.budget, max(left, self._least_chunk))

    def _free_blocks(self, first: EngineRequest, step: Schedule) -> None:
        """No step is possible: the first prefill gets its blocks at the cost of the last."""
        if grow_or_preempt(self, first, step):
            self._schedule_chunk(first, step)

    def _admit(self, prefills: list[EngineRequest], step: Schedule) -> None:
        num_promised = self._num_promised(prefills)
        while step.budget > 0 and (request := first_waiting(self, step)) is not None:
            whole = self.tables.reservation(request, request.num_tokens)
            if whole.num_needed + num_promised > self.tables.pool.num_available:
                return
            computed = whole.num_computed_tokens
            size = min(request.num_tokens - computed, self._limit(computed, step))
            self.tables.take(request, self.tables.cut(whole, computed + size))
            num_promised += self._num_promised([request])
            start(self, request, step)
            step.add(request, size)

    def _num_promised(self, prefills: list[EngineRequest]) -> int:
        """Blocks that unfinished prefills were admitted for and have not taken yet.

        Where the model has a window the tables promise them.
        """
        if self.settings.window is not None:
            return 0
        num_blocks = (self.tables.num_blocks(request.num_tokens) for request in prefills)
        held = (len(request.block_table) for request in prefills)
        return sum(num_blocks) - sum(held)
