"""Engine settings: sizes, scheduler, and what is refused before a model is loaded."""

from typing import Annotated, Literal

import msgspec

from pdcluster_schema.ports import MAX_ENGINES, MAX_RANKS
from pdcluster_worker.config.section import Natural, Positive, Section, Share
from pdcluster_worker.config.speculation import SpeculationConfig
from pdcluster_worker.config.vllm import VllmConfig, pdcluster_only_fields
from pdcluster_worker.messages.engine_settings import (
    ChunkSchedule,
    SchedulerName,
    SchedulerSettings,
    SchedulingPolicy,
    wrong_fields,
    wrong_sizes,
)

Ranks = Annotated[int, msgspec.Meta(ge=1, le=8)]

# each thread has a stack and waits at every barrier
Threads = Annotated[int, msgspec.Meta(ge=0, le=1024)]

# above the longest context of any model, for schedulers of whole prompts
StepTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]

StepSequences = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]  # each has a row of block tables


class ChunkScheduleConfig(Section, frozen=True):
    low: Positive
    high: Positive
    stages: Annotated[int, msgspec.Meta(ge=1, le=64)]
    max_tokens: Positive

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"chunkSchedule: low ({self.low}) must be at most high ({self.high})")


class PrefillDelayerConfig(Section, frozen=True):
    """Holding new prompts back to prefill them together (`engine.prefill_delayer`)."""

    enabled: bool = True
    max_delay_passes: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 30
    max_delay_milliseconds: Annotated[int, msgspec.Meta(ge=1, le=600_000)] = 5000
    token_usage_low_watermark: Share | None = None  # with less KV usage none waits
    queue_min_ratio: Share | None = None  # waiting over running requests


class EngineConfig(Section, frozen=True):
    type: Literal["pdcluster", "vllm"] = "pdcluster"
    vllm: VllmConfig = VllmConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto = by the pool's accelerator
    block_size: Positive = 16
    max_batched_tokens: StepTokens = 256
    max_sequences: StepSequences = 64
    max_model_len: Positive | None = None  # None = what the model and the KV cache allow
    prefix_caching: bool = True
    kv_cache_memory: Positive = 1 << 30  # ignored with num_blocks
    device_memory_share: Share | None = None  # for weights, KV blocks and steps of a GPU
    num_blocks: Positive | None = None
    threads: Threads = 0  # 0 = from the cgroup limit
    data_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_ENGINES)] = 1
    transport: Literal["auto", "tcp", "nixl", "ucx"] = "auto"
    transfer_bandwidth: Natural = 0  # bytes per second; 0 = no limit
    verify_transfers: bool = False
    fence_timeout_seconds: Annotated[float, msgspec.Meta(gt=0.0)] = 30.0  # older: overdue
    batch_invariant: bool = False  # bits do not depend on the batch or caching
    scheduler: SchedulerName = "continuous"
    scheduling_policy: SchedulingPolicy = "priority"
    long_prefill_token_threshold: Natural = 0
    chunked_prefill: bool = True
    tbt_slo_milliseconds: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    chunk_schedule: ChunkScheduleConfig | None = None
    # share of KV blocks left free
    admission_watermark: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    tensor_parallel_size: Ranks = 1
    pipeline_parallel_size: Ranks = 1
    prefill_delayer: PrefillDelayerConfig | None = None  # prefill and mixed workers only
    speculation: SpeculationConfig | None = None  # decode and mixed workers only

    def __post_init__(self) -> None:
        if self.type == "vllm" and (given := list(pdcluster_only_fields(self))):
            raise ValueError(
                f"{given[0]} is for engine type pdcluster, not vllm: leave it out, or say it in "
                "vLLM's own arguments"
            )
        if (ranks := self.tensor_parallel_size * self.pipeline_parallel_size) > MAX_RANKS:
            raise ValueError(
                f"tensorParallelSize ({self.tensor_parallel_size}) times pipelineParallelSize "
                f"({self.pipeline_parallel_size}) is {ranks} "
                f"ranks, over the {MAX_RANKS} of one worker: lower one of them"
            )
        if self.type == "vllm":
            return  # vLLM checks its own sizes
        # a step must have room for one token of each
        if self.max_batched_tokens < self.max_sequences:
            raise ValueError(
                f"maxBatchedTokens ({self.max_batched_tokens}) must be at least maxSequences "
                f"({self.max_sequences})"
            )
        scheduler, most = self.scheduler_settings, self.max_model_len
        wrong = wrong_fields(scheduler, self.max_batched_tokens)
        if not wrong and most is not None:
            wrong = wrong_sizes(scheduler, self.max_batched_tokens, most)
        if wrong:
            raise ValueError(wrong)

    @property
    def drafts(self) -> SpeculationConfig | None:
        """None = no speculative decoding."""
        own = self.speculation
        return None if own is None or own.method == "Off" else own

    @property
    def num_kv_ports(self) -> int:
        """One per rank; with pipeline stages only rank 0's."""
        return self.tensor_parallel_size if self.pipeline_parallel_size == 1 else 1

    @property
    def max_decode_rows(self) -> int:
        """Rows of the largest step of decodes and drafts."""
        num_drafts = 0 if self.drafts is None else self.drafts.num_tokens
        return max(
            self.max_sequences, min(self.max_batched_tokens, self.max_sequences * (1 + num_drafts))
        )

    @property
    def scheduler_settings(self) -> SchedulerSettings:
        milliseconds, chunks = self.tbt_slo_milliseconds, self.chunk_schedule
        return SchedulerSettings(
            name=self.scheduler,
            policy=self.scheduling_policy,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            chunked_prefill=self.chunked_prefill,
            tbt_slo_seconds=None if milliseconds is None else milliseconds / 1000.0,
            chunk_schedule=None
            if chunks is None
            else ChunkSchedule(**msgspec.structs.asdict(chunks)),
        )
