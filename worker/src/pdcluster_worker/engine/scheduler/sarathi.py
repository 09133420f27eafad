"""Stall-free batches, as in Sarathi-Serve: every decode in every step, chunks in what is left."""

# A prompt is admitted only when all its blocks could be had above a watermark, but takes them by
# chunks; its next chunk is cut to the free blocks.  If even a decode finds no block, an unfinished
# prefill loses its own; if none runs, the decode sits out until others end.
#
#     budget 8; a and b decode, c has 12 prompt tokens, d 3:
#     step 1  a 1, b 1, c 6        step 2  a 1, b 1, c 6        step 3  a 1, b 1, c 1, d 3

from pdcluster_worker.engine.block_table import BlockTables, ceil_div
from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.engine.scheduler.base import (
    Schedule,
    Scheduler,
    by_kind,
    is_decode,
    num_uncomputed,
)
from pdcluster_worker.messages.engine_settings import ChunkSchedule, EngineSettings

TILE = 128
"""Tokens that a matrix product computes at the price of one; budgets are multiples of it."""
SMALL_TILE = 32
"""Tile for budgets below two tiles, and for chunk schedules."""

SPARE = 0.1
"""Share of the target that a step leaves unused, for the ones after it with longer contexts."""
MOST_CHANGE = 2.0
"""Largest factor by which one step changes the budget: a single slow one may be the machine's
fault.
"""


def aligned(num_tokens: int) -> int:
    """The largest budget up to `num_tokens` that wastes no part of a tile."""
    for tile in (TILE, SMALL_TILE):
        if num_tokens >= 2 * tile:
            return num_tokens // tile * tile
    return num_tokens


def stage_sizes(schedule: ChunkSchedule) -> list[int]:
    """Chunk sizes by stage: from high to low in equal steps, in multiples of 32."""
    tile = min(SMALL_TILE, schedule.low)
    span, last = schedule.high - schedule.low, max(1, schedule.stages - 1)
    sizes = (schedule.high - span * stage // last for stage in range(schedule.stages))
    return [max(tile, round(size / tile) * tile) for size in sizes]


class ChunkBudget:
    """Tokens of the next step, decodes included: `most`, or what keeps steps within the target."""

    def __init__(self, most: int, least: int, target_seconds: float | None) -> None:
        self.num_tokens = most
        self._most = most
        self._least = min(least, most)
        self._target_seconds = target_seconds

    def adjust(self, num_tokens: int, seconds: float) -> None:
        if self._target_seconds is None or seconds <= 0.0:
            return
        change = (1.0 - SPARE) * self._target_seconds / seconds
        fitting = aligned(int(num_tokens * min(MOST_CHANGE, max(1.0 / MOST_CHANGE, change))))
        is_over = seconds > self._target_seconds
        is_full = num_tokens >= self.num_tokens  # a smaller step predicts nothing of a larger one
        if (is_over and fitting < self.num_tokens) or (is_full and fitting > self.num_tokens):
            self.num_tokens = max(self._least, min(self._most, fitting))


class Sarathi(Scheduler):
    def __init__(self, settings: EngineSettings, tables: BlockTables) -> None:
        super().__init__(settings, tables)
        own = settings.scheduler
        self._least_chunk = settings.block_size
        self._budget = ChunkBudget(
            settings.max_batched_tokens, self._least_chunk, own.tbt_slo_seconds
        )
        self._chunks = own.chunk_schedule
        # Most tokens of a step that computes a chunk of a prompt, by how far the prompt is.
        self._stage_sizes = stage_sizes(own.chunk_schedule) if own.chunk_schedule else []

    @property
    def num_promised_blocks(self) -> int:
        _, prefills = by_kind(self.running)
        return self._num_promised(prefills)

    @property
    def num_reserved_blocks(self) -> int:
        return super().num_reserved_blocks + self.num_promised_blocks

    def completed(self, num_tokens: int, seconds: float) -> None:
        self._budget.adjust(num_tokens, seconds)

    def schedule(self, *, admit: bool = True) -> Schedule:
        step = Schedule(self.settings.max_batched_tokens)
        self.start_ready(step)
        decodes, prefills = by_kind(self.computing)
        self._schedule_decodes(decodes, step)
        # However many decodes there are, prompts go on.
        target = max(self._budget.num_tokens, len(step.items) + self._least_chunk)
        step.budget = min(step.budget, target - len(step.items))
        prefills = [request for request in prefills if request.status is Status.RUNNING]
        for request in prefills:
            self._schedule_chunk(request, step)
        if prefills and not step.progressed and self.grow_or_preempt(prefills[0], step):
            # No step was possible: the first gets its blocks at the cost of the last.
            self._schedule_chunk(prefills[0], step)
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
            if self.fails_for_size(request, step):
                return False
            victim = self.last_in_order
            if is_decode(victim) and step.items:
                return False  # it sits out: a block comes free when one of the others ends
            self.preempt(victim, step)
            if victim is request:
                return False
        return True

    def _schedule_chunk(self, request: EngineRequest, step: Schedule) -> None:
        computed = request.num_scheduled_tokens
        free = self.num_tokens_with_blocks(request)
        size = min(num_uncomputed(request), self._limit(computed, step), free)
        if size > 0:
            self.tables.grow(request, computed + size)
            step.add(request, size)

    def _limit(self, num_computed_tokens: int, step: Schedule) -> int:
        if self._chunks is None:
            return step.budget
        num_batched = sum(item.num_tokens for item in step.items.values())
        stage = num_computed_tokens // ceil_div(self._chunks.max_tokens, self._chunks.stages)
        left = self._stage_sizes[min(stage, len(self._stage_sizes) - 1)] - num_batched
        return min(step.budget, max(left, self._least_chunk))

    def _admit(self, prefills: list[EngineRequest], step: Schedule) -> None:
        num_promised = self._num_promised(prefills)
        while step.budget > 0 and (request := self.first_waiting(step)) is not None:
            whole = self.tables.reservation(request, request.num_tokens)
            if whole.num_needed + num_promised > self.tables.pool.num_available:
                return
            computed = whole.num_computed_tokens
            size = min(request.num_tokens - computed, self._limit(computed, step))
            self.tables.take(request, self.tables.cut(whole, computed + size))
            num_promised += self._num_promised([request])
            self.start_first(request, step)
            step.add(request, size)

    def _num_promised(self, prefills: list[EngineRequest]) -> int:
        if self.settings.window is not None:
            return 0
        num_blocks = (self.tables.num_blocks(request.num_tokens) for request in prefills)
        held = (len(request.block_table) for request in prefills)
        return sum(num_blocks) - sum(held)
