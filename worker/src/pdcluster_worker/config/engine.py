"""The engine file's section for the engine: its sizes, its scheduler, and what is refused before a
model is loaded.
"""

from typing import Annotated, Literal

import msgspec

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

Threads = Annotated[int, msgspec.Meta(ge=0, le=1024)]
"""A number that is a slip is refused before they start: each takes a stack and waits at every
barrier of a step.
"""

StepTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
"""Above the longest context of any model, which a scheduler of whole prompts computes in a step."""

StepSequences = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
"""Each has a row of block tables, as long as the longest context."""

MAX_RANKS = 8
"""Most ranks of one engine: the accelerators of one machine."""

MAX_ENGINES = 8
"""Engine processes of one worker at most: each has KV ports of its own, from `listen.kv` on."""


class ChunkScheduleConfig(Section, frozen=True):
    """Chunk sizes of a prompt, see `engine_settings.ChunkSchedule`."""

    low: Positive
    high: Positive
    stages: Annotated[int, msgspec.Meta(ge=1, le=64)]
    max_tokens: Positive

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"chunkSchedule: low ({self.low}) must be at most high ({self.high})")


class PrefillDelayerConfig(Section, frozen=True):
    """Bounds within which new prompts are held back to be prefilled together; see
    `engine.prefill_delayer`.

    token_usage_low_watermark: below that share of used KV blocks none is held back; None = off.
    queue_min_ratio:           prompts wait until so many do, as a share of the requests that run;
                               None = off.
    """

    enabled: bool = True
    max_delay_passes: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 30
    max_delay_milliseconds: Annotated[int, msgspec.Meta(ge=1, le=600_000)] = 5000
    token_usage_low_watermark: Share | None = None
    queue_min_ratio: Share | None = None


class EngineConfig(Section, frozen=True):
    """Sizes of the engine; see `engine.core` and `model.runner` for their effect.

    type:                pdcluster = our own; vllm = a stock vLLM, which `vllm` describes.
    device:              what it computes on; auto = cuda where the pool has an accelerator, else
                         cpu.
    max_model_len:       longest prompt + output in tokens, refused where the KV pool does not hold
                         it; None = the model's own limit, or what the pool holds where that is
                         less.
    kv_cache_memory:     bytes for KV blocks; ignored when num_blocks is given.
    device_memory_share: of a GPU's memory, for weights, KV blocks and steps together; takes the
                         place of kv_cache_memory there.
    threads:             CPU threads of the model; 0 = from the cgroup limit.
    data_parallel_size:  engine processes of this worker, which share its threads, KV memory and
                         transfer bandwidth (`data_parallel`).
    transport:           that moves KV blocks to and from peers that have it too
                         (`kv_transfer.carriers`).
    transfer_bandwidth:  most bytes per second that this worker sends of KV; 0 = no limit.
    fence_timeout_seconds: a fence older than this is reported overdue (its blocks stay
                           quarantined).
    admission_watermark: share of the KV blocks left free by an admission beside others.
    batch_invariant:     a request's bits do not depend on what else is computed, cached or not,
                         here or remotely.
    scheduler and the fields below it: see `messages.engine_settings.SchedulerSettings`.
    tensor_parallel_size:   rank processes that share each layer; on GPUs, one accelerator each.
    pipeline_parallel_size: stages of layers, each of so many ranks.
    prefill_delayer:     of a prefill or mixed worker; None = prompts are not held back.
    speculation:         of a decode or mixed worker; None = nothing is drafted.
    """

    type: Literal["pdcluster", "vllm"] = "pdcluster"
    vllm: VllmConfig = VllmConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: Positive = 16
    max_batched_tokens: StepTokens = 256
    max_sequences: StepSequences = 64
    max_model_len: Positive | None = None
    prefix_caching: bool = True
    kv_cache_memory: Positive = 1 << 30
    device_memory_share: Share | None = None
    num_blocks: Positive | None = None
    threads: Threads = 0
    data_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_ENGINES)] = 1
    transport: Literal["auto", "tcp", "nixl", "ucx"] = "auto"
    transfer_bandwidth: Natural = 0
    verify_transfers: bool = False
    fence_timeout_seconds: Annotated[float, msgspec.Meta(gt=0.0)] = 30.0
    batch_invariant: bool = False
    scheduler: SchedulerName = "continuous"
    scheduling_policy: SchedulingPolicy = "priority"
    long_prefill_token_threshold: Natural = 0
    chunked_prefill: bool = True
    tbt_slo_milliseconds: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    chunk_schedule: ChunkScheduleConfig | None = None
    admission_watermark: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    tensor_parallel_size: Ranks = 1
    pipeline_parallel_size: Ranks = 1
    prefill_delayer: PrefillDelayerConfig | None = None
    speculation: SpeculationConfig | None = None

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
            return  # its sizes are its own to check
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
        """Settings of drafting; None = tokens are not drafted."""
        own = self.speculation
        return None if own is None or own.method == "Off" else own

    @property
    def num_kv_ports(self) -> int:
        """KV ports of one engine: each rank's own; with pipeline stages rank 0's alone."""
        return self.tensor_parallel_size if self.pipeline_parallel_size == 1 else 1

    @property
    def max_decode_rows(self) -> int:
        """Rows of the largest step of decodes and their drafts."""
        num_drafts = 0 if self.drafts is None else self.drafts.num_tokens
        return max(
            self.max_sequences, min(self.max_batched_tokens, self.max_sequences * (1 + num_drafts))
        )

    @property
    def scheduler_settings(self) -> SchedulerSettings:
        """Settings of the scheduler."""
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
