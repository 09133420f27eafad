"""Scheduling of an engine: names of schedulers, and the section of chunk sizes."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pdcluster_schema.rules import rule
from pdcluster_schema.section import SpecSection
from pdcluster_schema.values import Positive

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
