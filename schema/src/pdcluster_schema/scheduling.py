"""Scheduling of an engine: its section of chunk sizes, and the fields that fit together.

The CRD's rules say the same to the API server, and the worker once more when it
has loaded the model: only then the length of its context is known.
"""

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from pdcluster_schema.rules import rule
from pdcluster_schema.section import SpecSection
from pdcluster_schema.values import Positive

if TYPE_CHECKING:
    from pdcluster_schema.engine import EngineSpec

SchedulerName = Literal[
    "continuous",
    "sarathi",
    "prefill-first",
    "orca",
    "request-level",
    "simple-chunking",
]

WHOLE_PROMPT_SCHEDULERS: tuple[SchedulerName, ...] = ("prefill-first", "orca", "request-level")
"""Those that compute a prompt in one step, whatever its length."""


class ChunkScheduleSpec(SpecSection):
    """Chunk sizes by how far a prompt is; by default they only follow the budget. For scheduler
    sarathi.
    """

    low: Positive
    """Tokens of a step that computes the last part of a prompt."""
    high: Positive
    """Tokens of a step that computes the first part of a prompt."""
    stages: Annotated[int, Field(ge=1, le=64)]
    """Number of sizes from high to low, in equal steps."""
    max_tokens: Positive
    """Tokens of the longest prompt, which the stages divide evenly."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low > self.high:
            reason = f"must be at most high ({self.high}), not {self.low}"
            raise rule(reason, "lower low or raise high", at="low")
        return self


class SchedulingFault(NamedTuple):
    """Fields that do not fit together; field: the one to name."""

    field: str
    reason: str
    fix: str


def scheduling_fault(engine: "EngineSpec") -> SchedulingFault | None:
    """The first of them in one role's engine; a stock engine schedules as it will."""
    if engine.type != "pdcluster":
        return None
    return (
        _budget_too_small(engine)
        or _of_another_scheduler(engine)
        or _wrong_size(engine)
        or _too_few_blocks(engine)
    )


def _budget_too_small(engine: "EngineSpec") -> SchedulingFault | None:
    if engine.max_batched_tokens >= engine.max_sequences:
        return None
    reason = (
        f"must be at least maxSequences ({engine.max_sequences}), since a step computes a token "
        "of each sequence"
    )
    fix = "raise maxBatchedTokens or lower maxSequences"
    return SchedulingFault("maxBatchedTokens", reason, fix)


def _too_few_blocks(engine: "EngineSpec") -> SchedulingFault | None:
    if engine.num_blocks is None or engine.num_blocks >= engine.data_parallel_size:
        return None
    reason = (
        f"must be at least dataParallelSize ({engine.data_parallel_size}), whose engines share "
        f"them, not {engine.num_blocks}"
    )
    return SchedulingFault("numBlocks", reason, "raise numBlocks or lower dataParallelSize")


def _of_another_scheduler(engine: "EngineSpec") -> SchedulingFault | None:
    own = engine.scheduler
    for field, given in (
        ("tbtSloMilliseconds", engine.tbt_slo_milliseconds),
        ("chunkSchedule", engine.chunk_schedule),
    ):
        if given is not None and own != "sarathi":
            reason = f"is for scheduler sarathi, not {own}"
            return SchedulingFault(field, reason, "leave it out, or set scheduler: sarathi")
    if not engine.chunked_prefill and own != "continuous":
        reason = f"false is for scheduler continuous, not {own}"
        return SchedulingFault("chunkedPrefill", reason, "leave it out")
    if engine.long_prefill_token_threshold and (own != "continuous" or not engine.chunked_prefill):
        reason = "caps the chunks of scheduler continuous, and no prompt is cut so here"
        return SchedulingFault("longPrefillTokenThreshold", reason, "leave it out")
    return None


def _wrong_size(engine: "EngineSpec") -> SchedulingFault | None:
    budget, length = engine.max_batched_tokens, engine.max_model_len
    is_whole = not engine.chunked_prefill or engine.scheduler in WHOLE_PROMPT_SCHEDULERS
    if is_whole and length is not None and budget < length:
        reason = f"must be at least maxModelLen ({length}), since a step computes a whole prompt"
        return SchedulingFault(
            "maxBatchedTokens", reason, "raise maxBatchedTokens or lower maxModelLen"
        )
    if length is not None and engine.long_prefill_token_threshold > length:
        reason = f"must be at most maxModelLen ({length})"
        return SchedulingFault("longPrefillTokenThreshold", reason, "lower it or leave it out")
    if engine.chunk_schedule is not None and engine.chunk_schedule.high > budget:
        reason = f"must be at most maxBatchedTokens ({budget})"
        return SchedulingFault("chunkSchedule.high", reason, "lower high or raise maxBatchedTokens")
    return None
