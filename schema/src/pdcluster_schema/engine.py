"""The section `engine` of a PDCluster spec, and of each of its roles."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.quantity import Quantity
from pdcluster_schema.rules import rule
from pdcluster_schema.scheduling import ChunkScheduleSpec, SchedulerName
from pdcluster_schema.section import Many, SpecSection
from pdcluster_schema.values import Milliseconds, Natural, Positive, Ranks, Seconds, Text
from pdcluster_schema.vllm_engine import (
    MAX_ARGUMENT,
    MAX_ARGUMENTS,
    MAX_VARIABLES,
    EnvSpec,
    check_argument,
    check_variables,
)

MAX_ENGINES = 8
"""Most engines of one worker: each has a KV port of its own, which the network policy opens."""

MAX_BANDWIDTH = 10**12
"""Most bytes per second of a limit: more than any link carries."""

MAX_THREADS = 1024
"""Most threads of one engine: each takes a stack and waits at every barrier of a step."""

ACCELERATOR_TOKENS, ACCELERATOR_SEQUENCES, ACCELERATOR_MEMORY_SHARE = 8192, 256, 0.9
"""Sizes of our engine on an accelerator where none are given: vLLM's, of its server on an H100.

A step of a few hundred tokens reads the weights as long as it computes.
"""

BY_DEVICE = frozenset({"max_batched_tokens", "max_sequences", "kv_cache_memory"})
"""Fields of which the default, given, is another value than none on an accelerator."""

Argument = Annotated[Text, Field(max_length=MAX_ARGUMENT), AfterValidator(check_argument)]
"""A flag of a stock engine, or the value of one."""


class PrefillDelayerSpec(SpecSection):
    """Time for which new prompts are held back so that they are prefilled together.

    max_delay_passes:          steps of the engine for which a prompt is held back, less one
    token_usage_low_watermark: below that share of used KV blocks none is held back; None = off
    queue_min_ratio:           prompts wait until so many do, as a share of the requests that run;
                               None = off
    """

    enabled: bool = True
    max_delay_passes: Annotated[int, Field(ge=1, le=10_000)] = 30
    max_delay_milliseconds: Annotated[int, Field(ge=1, le=600_000)] = 5000
    token_usage_low_watermark: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    queue_min_ratio: Annotated[float, Field(gt=0.0, le=1.0)] | None = None


class SpeculationSpec(SpecSection):
    """Tokens that are guessed and verified by the next step, on decode and mixed workers.

    method:                Off = none are; ngram = from the request's own tokens; draft = by a
                           smaller model
    draft_model:           folder of that model as the workers see it, or below the root of
                           spec.model.pvc; for draft
    num_tokens:            most drafts of one request in a step
    prompt_lookup_max, prompt_lookup_min: most and fewest last tokens that a match is looked for
                                          with
    adaptive:              a request is not drafted while its drafts are measured not to pay
    disable_above_running: with more running requests nothing is drafted; None = no such bound
    """

    method: Literal["Off", "ngram", "draft"] = "ngram"
    draft_model: Text | None = None
    num_tokens: Annotated[int, Field(ge=1, le=16)] = 3
    prompt_lookup_max: Positive = 5
    prompt_lookup_min: Positive = 3
    adaptive: bool = True
    disable_above_running: Positive | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.method == "draft" and self.draft_model is None:
            raise rule(
                "is missing, and method: draft needs it",
                "give the folder of a smaller model",
                at="draftModel",
            )
        if self.method == "ngram" and self.draft_model is not None:
            raise rule(
                "is for method draft, not ngram",
                "leave it out, or set method: draft",
                at="draftModel",
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            reason = (
                f"must be at most promptLookupMax ({self.prompt_lookup_max}), not "
                f"{self.prompt_lookup_min}"
            )
            raise rule(reason, "lower the one or raise the other", at="promptLookupMin")
        return self


class EngineSpec(SpecSection):
    """Sizes of the engine.

    On a role, only the values that are given count: they go over those of `spec.engine`.

    type:                  our own engine, or a stock one beside our server process; of the whole
                           cluster, and of no role alone
    image:                 of the stock engine, unmodified; on Kubernetes it has to be given
    command:               program of the stock engine; its flags follow.  None = vllm serve
    args:                  more flags for it
    env:                   more environment variables for it
    device:                what it computes on; auto = cuda where the pool has an accelerator, else
                           cpu
    block_size:            tokens of one KV block
    max_batched_tokens:    token budget of one step; on an accelerator 8192 unless it is given
    max_sequences:         most requests in one step; on an accelerator 256 unless it is given
    max_model_len:         longest prompt + output in tokens; None = the model's own limit
    kv_cache_memory:       bytes for KV blocks (512Mi in YAML); ignored when num_blocks is given
    device_memory_share:   of a GPU's memory, for weights, KV blocks and steps together; takes the
                           place of kv_cache_memory there; None = 0.9 on an accelerator where
                           neither kv_cache_memory nor num_blocks is given
    num_blocks:            KV blocks; None = as many as the memory for them holds
    threads:               CPU threads of the model; 0 = from the machine
    data_parallel_size:    engine processes of one worker, which share its threads, KV memory and
                           bandwidth
    transport:             that moves KV blocks between workers that both have it; auto = nixl, else
                           ucx, where there is an RDMA device, else tcp
    transfer_bandwidth:    most bytes per second of KV that a worker sends; 0 = no limit
    verify_transfers:      send and compare a checksum of every KV transfer
    fence_timeout_seconds: a fence older than this is reported; its blocks stay quarantined
    admission_watermark:   share of the KV blocks left free by an admission beside others
    batch_invariant:       a request's bits do not depend on what else is computed, on CPUs of one
                           kind
    scheduler:             which requests share a step, and how prompts are cut
    scheduling_policy:     fcfs = by arrival; priority = lower first, ties by arrival; preemptive =
                           so too, and a waiting request takes the seat and the blocks of a running
                           one of lower priority
    long_prefill_token_threshold: most tokens of one prompt in a step while others want some too;
                           0 = no such limit; for continuous
    chunked_prefill:       a prompt may be computed in parts; for continuous
    tbt_slo_milliseconds:  time between two tokens that steps are kept within by their size; for
                           sarathi
    chunk_schedule:        chunk sizes by how far a prompt is; for sarathi
    tensor_parallel_size:   rank processes that share each layer; on GPUs, one accelerator each
    pipeline_parallel_size: stages of layers, each of so many ranks
    prefill_delayer:       of prefill and mixed workers; None = prompts are not held back
    speculation:           of decode and mixed workers; None = no token is guessed
    """

    type: Literal["pdcluster", "vllm"] = "pdcluster"
    image: Text | None = None
    command: Annotated[tuple[Text, ...], Many, Field(min_length=1, max_length=16)] | None = None
    args: Annotated[tuple[Argument, ...], Many, Field(max_length=MAX_ARGUMENTS)] | None = None
    env: (
        Annotated[
            tuple[EnvSpec, ...],
            Many,
            Field(max_length=MAX_VARIABLES),
            AfterValidator(check_variables),
        ]
        | None
    ) = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: Positive = 16
    max_batched_tokens: Annotated[int, Field(ge=1, le=1 << 24)] = 256
    max_sequences: Annotated[int, Field(ge=1, le=1 << 16)] = 64
    max_model_len: Positive | None = None
    prefix_caching: bool = True
    kv_cache_memory: Quantity = 1 << 30
    device_memory_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    num_blocks: Positive | None = None
    threads: Annotated[int, Field(ge=0, le=MAX_THREADS)] = 0
    data_parallel_size: Annotated[int, Field(ge=1, le=MAX_ENGINES)] = 1
    transport: Literal["auto", "tcp", "nixl", "ucx"] = "auto"
    transfer_bandwidth: Annotated[int, Field(ge=0, le=MAX_BANDWIDTH)] = 0
    verify_transfers: bool = False
    fence_timeout_seconds: Seconds = 30.0
    batch_invariant: bool = False
    scheduler: SchedulerName = "continuous"
    scheduling_policy: Literal["fcfs", "priority", "preemptive"] = "priority"
    long_prefill_token_threshold: Natural = 0
    chunked_prefill: bool = True
    tbt_slo_milliseconds: Milliseconds | None = None
    chunk_schedule: ChunkScheduleSpec | None = None
    admission_watermark: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    tensor_parallel_size: Ranks = 1
    pipeline_parallel_size: Ranks = 1
    prefill_delayer: PrefillDelayerSpec | None = None
    speculation: SpeculationSpec | None = None

    def overridden_by(self, role_engine: "EngineSpec") -> "EngineSpec":
        """This engine with the values that `role_engine` was given."""
        return self.model_copy(
            update={name: getattr(role_engine, name) for name in role_engine.model_fields_set}
        )

    def computes_on(self, gpu: str) -> bool:
        """Return whether workers of a pool with this type of accelerator compute on it."""
        return gpu != NO_ACCELERATOR and self.device != "cpu"

    def sized_for(self, *gpus: str) -> "EngineSpec":
        """This engine as workers of pools with these types of accelerator have it: ours with the
        sizes of an accelerator where none are given, if all of them compute on one.
        """
        if self.type != "pdcluster" or not all(self.computes_on(gpu) for gpu in gpus):
            return self
        given = self.model_fields_set
        sizes: dict[str, Any] = {}
        if "max_batched_tokens" not in given:
            sizes["max_batched_tokens"] = ACCELERATOR_TOKENS
        if "max_sequences" not in given:
            tokens = sizes.get("max_batched_tokens", self.max_batched_tokens)
            sizes["max_sequences"] = min(ACCELERATOR_SEQUENCES, tokens)
        memory = (self.device_memory_share, self.num_blocks)
        if memory == (None, None) and "kv_cache_memory" not in given:
            sizes["device_memory_share"] = ACCELERATOR_MEMORY_SHARE
        return self.model_copy(update=sizes)
