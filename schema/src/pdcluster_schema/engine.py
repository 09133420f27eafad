"""The section `engine` of a PDCluster spec, and of each of its roles."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.kv_tiers import KvTiers
from pdcluster_schema.kv_transfer import KvTransferSpec
from pdcluster_schema.ports import MAX_WORKER_RANKS, SchedulerName
from pdcluster_schema.quantities import Quantity
from pdcluster_schema.section import Crd, Many, Rule, SpecSection
from pdcluster_schema.stock_engine import (
    ARGUMENT_RULES,
    MAX_ARGUMENT,
    MAX_ARGUMENTS,
    MAX_VARIABLES,
    STOCK,
    EnvSpec,
    check_argument,
    check_variables,
    merged_variables,
)
from pdcluster_schema.values import Milliseconds, Natural, Positive, Ranks, Seconds, Text
from pdcluster_schema.vllm_flags import merged_arguments

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

Argument = Annotated[
    Text, Field(max_length=MAX_ARGUMENT), AfterValidator(check_argument), Crd(*ARGUMENT_RULES)
]
"""A flag of a stock engine, or the value of one."""


class PrefillDelayerSpec(SpecSection):
    """Holds new prompts of prefill and mixed workers back for some steps, so that they are
    prefilled together; by default none is.
    """

    enabled: bool = True
    """Hold prompts back. Default true."""
    max_delay_passes: Annotated[int, Field(ge=1, le=10_000)] = 30
    """Steps of the engine for which a prompt is held back at most, less one. Default 30."""
    max_delay_milliseconds: Annotated[int, Field(ge=1, le=600_000)] = 5000
    """Time for which a prompt is held back at most. Default 5000."""
    token_usage_low_watermark: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of used KV blocks below which no prompt is held back; by default there is none."""
    queue_min_ratio: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Prompts wait until so many do, as a share of the requests that run; by default they do not.
    """


class SpeculationSpec(SpecSection):
    """Guesses tokens of decode and mixed workers' requests, which the next step of the model
    verifies together; answers stay the same. By default no token is guessed.
    """

    method: Literal["Off", "ngram", "draft"] = "ngram"
    """Off = no token is guessed; ngram = from what followed the request's last tokens where they
    stood before; draft = by a smaller model. Default ngram.
    """
    draft_model: Text | None = None
    """Folder of the smaller model of the same vocabulary, as the workers see it, or below the root
    of model.pvc.
    """
    num_tokens: Annotated[int, Field(ge=1, le=16)] = 3
    """Most tokens that are guessed for one request in a step. Default 3."""
    prompt_lookup_max: Positive = 5
    """Most last tokens that a match is looked for with. Default 5."""
    prompt_lookup_min: Positive = 3
    """Fewest last tokens that a match is looked for with. Default 3."""
    adaptive: bool = True
    """Stop guessing for a request while its guesses are measured not to pay. Default true."""
    disable_above_running: Positive | None = None
    """No token is guessed while more requests than this run; by default there is no such bound."""

    RULES = (
        Rule(
            cel="self.?promptLookupMin.orValue(3) <= self.?promptLookupMax.orValue(5)",
            holds=lambda drafts: drafts.prompt_lookup_min <= drafts.prompt_lookup_max,
            reason="must be at most {promptLookupMax}",
            fix="lower the one or raise the other",
            at="promptLookupMin",
        ),
        Rule(
            cel="self.?method.orValue('ngram') == 'Off' || (self.?method.orValue('ngram') == "
            "'draft') == has(self.draftModel)",
            holds=lambda drafts: (
                drafts.method == "Off"
                or (drafts.method == "draft") == (drafts.draft_model is not None)
            ),
            reason="is for method: draft, which needs it",
            fix="give the folder of a smaller model with that method, or leave it out",
            at="draftModel",
        ),
    )


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

    RULES = (
        Rule(
            cel="self.low <= self.high",
            holds=lambda sizes: sizes.low <= sizes.high,
            reason="must be at most {high}",
            fix="lower low or raise high",
            at="low",
        ),
    )


_MERGED: dict[str, Callable[[Any, Any], object]] = {
    "args": merged_arguments,
    "env": merged_variables,
    "kv_transfer": KvTransferSpec.overridden_by,
}
"""Fields of which a role's does not take the place of the spec's."""


class EngineSpec(SpecSection):
    """The engine of every worker; a role's own engine goes over it, value by value."""

    type: Literal["pdcluster", "vllm", "sglang"] = "pdcluster"
    """Engine of every worker: pdcluster = our own; vllm, sglang = an unmodified vLLM or SGLang
    beside our server process (docs/engines.md); sglang for mixed workers alone. Of the whole
    cluster, so in spec.engine alone. Default pdcluster.
    """
    image: Text | None = None
    """Image of the stock engine, unmodified, such as vllm/vllm-openai:v0.32.0; pullPolicy and
    pullSecrets are those of spec.image. For types vllm and sglang, which need it; pdctl up does not
    read it.
    """
    command: Annotated[tuple[Text, ...], Many, Field(min_length=1, max_length=16)] | None = None
    """Program of the stock engine; the model's folder and all flags follow it. By default vllm
    serve, or python3 -m sglang.launch_server, as the image or, for pdctl up, the PATH has it. For
    types vllm and sglang.
    """
    args: Annotated[tuple[Argument, ...], Many, Field(max_length=MAX_ARGUMENTS)] | None = None
    """More flags of the stock engine, such as --enforce-eager; flags that a field stands for, and
    those that PDCluster sets, are refused. A role's are added to those of spec.engine, and go over
    the same flags there. For types vllm and sglang.
    """
    env: (
        Annotated[
            tuple[EnvSpec, ...],
            Many,
            Crd(list_type="map", list_map_keys=["name"]),
            Field(max_length=MAX_VARIABLES),
            AfterValidator(check_variables),
        ]
        | None
    ) = None
    """More environment variables of the stock engine; values of Secrets go through a podTemplate's
    container named engine. A role's are added to those of spec.engine, and go over the same names
    there. For types vllm and sglang.
    """
    kv_transfer: KvTransferSpec | None = None
    allow_unknown_version: bool = False
    """Serve with a version of the stock engine that is not known (docs/engines.md), which the
    condition of the role says; without it such a worker does not become ready. For types vllm and
    sglang. Default false.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto = cuda where the pool has an accelerator, else cpu. A worker that
    cannot have it does not become ready and says why; cpu on a pool with an accelerator leaves that
    idle. Default auto.
    """
    block_size: Positive = 16
    """Tokens of one KV block. Default 16."""
    max_batched_tokens: Annotated[int, Field(ge=1, le=1 << 24)] = 256
    """Token budget of one step. Default 256; 8192 for workers that compute on an accelerator."""
    max_sequences: Annotated[int, Field(ge=1, le=1 << 16)] = 64
    """Most requests in one step. Default 64; 256 (at most maxBatchedTokens) for workers that
    compute on an accelerator.
    """
    max_model_len: Positive | None = None
    """Longest prompt + output in tokens; a worker whose KV blocks do not hold it is refused at
    start. By default the model's own limit, or what the KV blocks hold where that is less.
    """
    prefix_caching: bool = True
    """Keep the KV blocks of ended requests for equal prompt prefixes. Default true."""
    kv_cache_dtype: Literal["auto", "bf16", "fp8_e4m3", "int8"] = "auto"
    """Dtype of keys and values in KV blocks, on the wire and in tiers: auto = the model's; fp8_e4m3
    and int8 = 8 bits and a scale for each token and head, about half the bytes of bf16, at some
    loss (docs/kv-blocks.md); fp8_e4m3 needs a GPU with FP8, or a CPU. Prefill and decode have the
    same. Default auto.
    """
    quantization: Literal["none", "int8", "fp8_e4m3"] = "none"
    """Precision in which the layers' weights are held: none = as the checkpoint has them; int8 and
    fp8_e4m3 = quantized as they are loaded, 8 bits and a scale for each output, about half the
    bytes of bf16, at some loss (docs/models.md). Embedding and head stay as they are. Default none.
    """
    allow_mixed_precision: bool = False
    """Let workers pair whose weights are held in different precisions, by quantization of one role:
    decode then goes on from KV that other weights computed. Not with batchInvariant. Default false.
    """
    kv_cache_memory: Quantity = 1 << 30
    """Memory for KV blocks of one worker, in bytes or as a quantity such as 512Mi; ignored when
    numBlocks is given. Default 1Gi; on an accelerator deviceMemoryShare counts unless this is
    given.
    """
    device_memory_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of a GPU's memory, such as 0.9, that a worker takes for weights, KV blocks and steps
    together; KV blocks get what the others leave of it, in place of kvCacheMemory. Without effect
    on a CPU and where numBlocks is given. Default 0.9 for workers that compute on an accelerator,
    unless kvCacheMemory or numBlocks is given.
    """
    num_blocks: Positive | None = None
    """KV blocks of one worker; by default as many as kvCacheMemory, or deviceMemoryShare, holds."""
    kv_tiers: KvTiers | None = None
    """Memory below the KV blocks, for prefixes that leave them: host memory, a local disk, and a
    directory that workers share, in this order (docs/kv-blocks.md); an empty list leaves a role
    without those of spec.engine. By default there is none.
    """
    threads: Annotated[int, Field(ge=0, le=MAX_THREADS)] = 0
    """CPU threads of the model; 0 = from the CPU limit; under pdctl up a share of the machine and
    idle cores of its other engines. Default 0.
    """
    data_parallel_size: Annotated[int, Field(ge=1, le=MAX_WORKER_RANKS)] = 1
    """Engine processes of one worker, behind its one address. They share its threads, KV memory,
    blocks and transferBandwidth; each loads the weights and has maxBatchedTokens and maxSequences
    of its own; at most 8. One that dies is started again while the others keep serving. For type
    vllm: ranks of its one server, each with accelerators of its own, in all pods of the worker;
    they end together. Default 1.
    """
    transport: Literal["auto", "tcp", "nixl", "ucx"] = "auto"
    """Transport of KV blocks between workers. nixl and ucx need an image with that extra
    (docs/kv-blocks.md) and carry over RDMA or shared memory what they can; auto = nixl, else ucx,
    on machines with an RDMA device, and tcp on others, where it is faster. A pair that the
    transport does not connect uses tcp, and status.disaggregation says why. Default auto.
    """
    transfer_bandwidth: Annotated[int, Field(ge=0, le=MAX_BANDWIDTH)] = 0
    """Most bytes per second of KV that a worker sends; 0 = no limit. Default 0."""
    verify_transfers: bool = False
    """Send and compare a checksum of every KV transfer. Default false."""
    fence_timeout_seconds: Seconds = 30.0
    """Seconds after which a fence is reported overdue; its blocks stay quarantined. Default 30."""
    batch_invariant: bool = False
    """A request's tokens do not depend, bit by bit, on what else is computed, cached or not, here
    or remotely, on CPUs of one kind. Needs the compiled kernels and a model that our own decoder
    runs. Default false.
    """
    scheduler: SchedulerName = "continuous"
    """Choice of the requests that share a step, and of the cuts of prompts (docs/scheduling.md).
    prefill-first, orca and request-level compute a prompt in one step, which needs maxBatchedTokens
    of at least the context's length. Default continuous.
    """
    scheduling_policy: Literal["fcfs", "priority", "preemptive"] = "priority"
    """Order of requests: fcfs = the one that arrived first; priority = the one with the lowest
    priority, then by arrival; preemptive = so too, and a waiting request takes the seat and the KV
    blocks of a running one of lower priority, which begins again later with its output kept.
    Default priority.
    """
    long_prefill_token_threshold: Natural = 0
    """Most tokens of one prompt in a step while other prompts want some too; 0 = no such limit. For
    scheduler continuous. Default 0.
    """
    chunked_prefill: bool = True
    """A prompt may be computed in parts. false needs maxBatchedTokens of at least the context's
    length. For scheduler continuous. Default true.
    """
    tbt_slo_milliseconds: Milliseconds | None = None
    """Time between two tokens of an answer that steps are kept within, by the tokens they hold: at
    most maxBatchedTokens, which is the number without it. For scheduler sarathi.
    """
    chunk_schedule: ChunkScheduleSpec | None = None
    admission_watermark: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the KV blocks, such as 0.05, that stays free when a request is admitted while others
    hold blocks: room for those to grow into, so that fewer are preempted. Schedulers sarathi and
    prefill-first leave 1 % at least. Default 0.
    """
    tensor_parallel_size: Ranks = 1
    """Rank processes that share each layer, on GPUs with an accelerator each; it must divide the
    model's KV heads, attention heads and intermediate size. Of prefill and decode one may be a
    multiple of the other. Default 1.
    """
    pipeline_parallel_size: Ranks = 1
    """Stages that the model's layers are divided into, each of tensorParallelSize ranks. Default 1.
    """
    prefill_delayer: PrefillDelayerSpec | None = None
    speculation: SpeculationSpec | None = None

    def overridden_by(self, role_engine: "EngineSpec") -> "EngineSpec":
        """This engine with the values that `role_engine` was given; `args` by flag, `env` by
        name, `kv_transfer` by field.
        """
        update = {name: getattr(role_engine, name) for name in role_engine.model_fields_set}
        for name, merged in _MERGED.items():
            ours, theirs = getattr(self, name), update.pop(name, None)
            if theirs is not None:
                update[name] = theirs if ours is None else merged(ours, theirs)
        return self.model_copy(update=update)

    @property
    def is_stock(self) -> bool:
        return self.type in STOCK

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
