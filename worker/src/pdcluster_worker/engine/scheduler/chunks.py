"""Chunks of prompts: what of them goes into a step, and how large a step may be.

`ChunkBudget` keeps the time of a step under a target by the number of its
tokens.  Where a step of n tokens takes a + b * n seconds, each change brings
the budget nearer to what just fits and never past it.
"""

from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.engine.scheduler.queues import Queues
from pdcluster_worker.engine.scheduler.schedule import Schedule
from pdcluster_worker.messages.engine_settings import ChunkSchedule

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


def schedule_chunks(
    queues: Queues, prefills: list[EngineRequest], step: Schedule, limit: int | None = None
) -> None:
    """Schedule a chunk of each unfinished prefill that still runs, in order; its blocks were
    promised to it.
    """
    for request in prefills:
        if step.budget == 0:
            return
        if request.status is Status.RUNNING:  # no decode has preempted it
            item = step.add(request, limit)
            is_held = queues.tables.grow(request, item.end)
            assert is_held, f"request {request.request_id} lacks blocks that it was admitted for"


def aligned(num_tokens: int) -> int:
    """The largest budget up to `num_tokens` that wastes no part of a tile."""
    for tile in (TILE, SMALL_TILE):
        if num_tokens >= 2 * tile:
            return num_tokens // tile * tile
    return num_tokens


def stage_sizes(schedule: ChunkSchedule) -> list[int]:
    """Chunk sizes by stage: from high to low in equal steps, in multiples of 32.

    >>> stage_sizes(ChunkSchedule(low=64, high=512, stages=4, max_tokens=4096))
    [512, 352, 224, 64]
    """
    tile = min(SMALL_TILE, schedule.low)
    span, last = schedule.high - schedule.low, max(1, schedule.stages - 1)
    sizes = (schedule.high - span * stage // last for stage in range(schedule.stages))
    return [max(tile, round(size / tile) * tile) for size in sizes]


class StageSizes:
    """The most tokens of a step that computes a chunk of a prompt, by how far the prompt is."""

    def __init__(self, schedule: ChunkSchedule) -> None:
        self._sizes = stage_sizes(schedule)
        self._tokens_per_stage = -(-schedule.max_tokens // schedule.stages)

    def at(self, num_computed_tokens: int) -> int:
        """Beyond the last stage its size stays."""
        return self._sizes[min(num_computed_tokens // self._tokens_per_stage, len(self._sizes) - 1)]


class ChunkBudget:
    """Tokens of the next step, decodes included; adjusted by the time of the last.

    most:           upper bound, and the first value.
    least:          lower bound.
    target_seconds: the most that a step is to take; None = the budget stays at `most`.
    """

    def __init__(self, most: int, least: int, target_seconds: float | None) -> None:
        self.num_tokens = most
        self._most = most
        self._least = min(least, most)
        self._target_seconds = target_seconds

    def adjust(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if self._target_seconds is None or seconds <= 0.0:
            return
        change = (1.0 - SPARE) * self._target_seconds / seconds
        fitting = aligned(int(num_tokens * min(MOST_CHANGE, max(1.0 / MOST_CHANGE, change))))
        is_over = seconds > self._target_seconds
        is_full = num_tokens >= self.num_tokens  # a smaller step predicts nothing of a larger one
        if (is_over and fitting < self.num_tokens) or (is_full and fitting > self.num_tokens):
            self.num_tokens = max(self._least, min(self._most, fitting))
