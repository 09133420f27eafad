"""The engine's settings: what the pure core needs to know, and nothing of files or devices.

A `Section` is a part of the engine file too, and read from it.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

import msgspec

from pdcluster_schema.ports import WHOLE_PROMPT_SCHEDULERS, SchedulerName

Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]


class Section(
    msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True
):
    pass


SCHEDULER_NAMES: tuple[SchedulerName, ...] = get_args(SchedulerName)

WATERMARK_SCHEDULERS: tuple[SchedulerName, ...] = ("prefill-first", "sarathi")
"""Those whose admissions leave at least one block of `BLOCKS_PER_KEPT` free."""

BLOCKS_PER_KEPT = 100

SchedulingPolicy = Literal[
    "fcfs",  # by arrival
    "priority",  # lower first, ties by arrival
    "preemptive",  # too, and a waiting request takes the slot of a running one of lower priority
]


class ChunkSchedule(Section, frozen=True):
    """Chunk sizes over a prompt: large at its start, small where its context is long."""

    low: Positive  # tokens of the last stage's chunks
    high: Positive  # and of the first one's
    stages: Annotated[int, msgspec.Meta(ge=1, le=64)]  # sizes from high to low, in equal steps
    max_tokens: Positive  # of the longest prompt, which the stages divide evenly

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"chunkSchedule: low ({self.low}) must be at most high ({self.high})")


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Choice of a scheduler, and its settings."""

    name: SchedulerName = "continuous"
    policy: SchedulingPolicy = "priority"
    # For continuous: most tokens of one prompt in a step while other prompts want some; 0 = any.
    long_prefill_token_threshold: int = 0
    chunked_prefill: bool = True  # for continuous: a prompt may be computed in parts
    # For sarathi: the time between two tokens that steps are kept within by their size.
    tbt_slo_seconds: float | None = None
    chunk_schedule: ChunkSchedule | None = None  # for sarathi; None = chunks of any size

    @property
    def computes_whole_prompts(self) -> bool:
        return not self.chunked_prefill or self.name in WHOLE_PROMPT_SCHEDULERS


MOST_DRAFTS = 16  # of one request; each is a row of the step


class SpeculationSettings(Section, frozen=True):
    """Drafting tokens, to be verified by the next step."""

    method: Literal["Off", "ngram", "draft"] = "ngram"  # ngram = the request's own tokens
    draft_model: str | None = None  # folder of a model with the same tokens
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_DRAFTS)] = 3  # drafts of one request
    prompt_lookup_max: Positive = 5  # suffix to match
    prompt_lookup_min: Positive = 3
    adaptive: bool = True  # skip requests whose drafts do not pay
    disable_above_running: Positive | None = None  # with more running requests; None = no bound

    def __post_init__(self) -> None:
        if self.method == "draft" and not self.draft_model:
            raise ValueError(
                "speculation.method: draft needs speculation.draftModel: give the folder of a "
                "smaller model"
            )
        if self.method == "ngram" and self.draft_model is not None:
            raise ValueError(
                "speculation.draftModel is for method draft, not ngram: leave it out, or set "
                "method: draft"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"speculation.promptLookupMin ({self.prompt_lookup_min}) must be at most "
                f"promptLookupMax ({self.prompt_lookup_max}): "
                "lower the one or raise the other"
            )


class DelayerSettings(Section, frozen=True):
    """Holding new prompts back to prefill them together (`engine.prefill_delayer`)."""

    enabled: bool = True
    max_delay_passes: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 30  # of this engine, less one
    max_delay_milliseconds: Annotated[int, msgspec.Meta(ge=1, le=600_000)] = 5000
    token_usage_low_watermark: Share | None = None  # with less KV usage none waits
    queue_min_ratio: Share | None = None  # waiting over running requests, once all can prefill

    @property
    def max_delay_seconds(self) -> float:
        return self.max_delay_milliseconds / 1000


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes of one engine."""

    block_size: int
    num_blocks: int  # KV blocks in all
    max_batched_tokens: int  # token budget of one step
    max_sequences: int  # most requests running at once
    max_model_len: int  # most tokens of one request, prompt and output together
    prefix_caching: bool = True
    fence_timeout_seconds: float = 30.0  # a fence older than this counts as overdue
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    admission_watermark: float = 0.0  # share of the blocks left free by an admission beside others
    # Tokens that one attends to in every layer, itself included; None: all.  The cache then has one
    # block more than `num_blocks`, the null block.
    window: int | None = None
    speculation: SpeculationSettings | None = None  # None = nothing is drafted
    adapters: frozenset[str] = frozenset()  # names of the model's LoRA adapters

    @property
    def null_block(self) -> int:
        """Stands in a table for blocks that have left the window; in no pool, never read."""
        return self.num_blocks

    @property
    def num_kept_blocks(self) -> int:
        """Blocks that an admission beside others leaves free."""
        own = int(self.admission_watermark * self.num_blocks)
        if self.scheduler.name not in WATERMARK_SCHEDULERS:
            return own
        return max(own, -(-self.num_blocks // BLOCKS_PER_KEPT))


def wrong_fields(scheduler: SchedulerSettings, max_batched_tokens: int) -> str:
    """Field that belongs to another scheduler, or does not fit; empty when none does."""
    name, chunks = scheduler.name, scheduler.chunk_schedule
    if name != "sarathi":
        for field_name, given in (
            ("tbtSloMilliseconds", scheduler.tbt_slo_seconds),
            ("chunkSchedule", chunks),
        ):
            if given is not None:
                return f"{field_name} is for scheduler sarathi, not {name}: leave it out"
    if name != "continuous" and not scheduler.chunked_prefill:
        return f"chunkedPrefill: false is for scheduler continuous, not {name}: leave it out"
    cuts_prompts = name == "continuous" and scheduler.chunked_prefill
    if scheduler.long_prefill_token_threshold > 0 and not cuts_prompts:
        what = "caps the chunks of scheduler continuous, and no prompt is cut so here"
        return f"longPrefillTokenThreshold {what}: leave it out"
    if chunks is not None and chunks.high > max_batched_tokens:
        return (
            f"chunkSchedule.high ({chunks.high}) must be at most maxBatchedTokens "
            f"({max_batched_tokens}): lower the one or raise the other"
        )
    return ""


def wrong_sizes(scheduler: SchedulerSettings, max_batched_tokens: int, max_model_len: int) -> str:
    """Reason why this scheduler cannot serve requests of `max_model_len` tokens; "" if it can."""
    if scheduler.computes_whole_prompts and max_batched_tokens < max_model_len:
        how = (
            f"scheduler {scheduler.name}" if scheduler.chunked_prefill else "chunkedPrefill: false"
        )
        return (
            f"{how} computes a prompt in one step, and maxBatchedTokens ({max_batched_tokens}) is "
            f"below the longest request of {max_model_len} tokens: raise maxBatchedTokens, or set "
            "maxModelLen to at most that"
        )
    if scheduler.long_prefill_token_threshold > max_model_len:
        return (
            f"longPrefillTokenThreshold ({scheduler.long_prefill_token_threshold}) is above the "
            f"longest request of {max_model_len} tokens: lower it, or leave it out"
        )
    return ""
