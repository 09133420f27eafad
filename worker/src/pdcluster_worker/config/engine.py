"""Engine settings: sizes, scheduler, and what is refused before a model is loaded."""

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from pdcluster_schema.ports import MAX_ENGINES, MAX_RANKS, MAX_WORKER_RANKS, SchedulerName
from pdcluster_worker.messages.engine_settings import (
    ChunkSchedule,
    DelayerSettings,
    Natural,
    Positive,
    SchedulerSettings,
    SchedulingPolicy,
    Section,
    Share,
    SpeculationSettings,
    wrong_fields,
    wrong_sizes,
)

OwnPort = Annotated[int, msgspec.Meta(ge=1, le=65535)]

# fmt: off
OURS_ALONE = (
    "device", "kv_cache_dtype", "quantization", "allow_mixed_precision",
    "kv_cache_memory", "device_memory_share", "num_blocks", "threads",
    "transport", "transfer_bandwidth", "verify_transfers", "fence_timeout_seconds",
    "admission_watermark", "batch_invariant", "scheduler", "scheduling_policy",
    "long_prefill_token_threshold", "chunked_prefill", "tbt_slo_milliseconds",
    "chunk_schedule", "prefill_delayer", "speculation", "kv_tiers",
)
"""Fields of `engine` that a stock engine does not read."""
# fmt: on


class VllmConfig(Section, frozen=True):
    port: OwnPort = 8100
    kv_events_port: OwnPort = 8101  # on loopback, but for events_from_pods
    events_from_pods: bool = False  # ranks in other pods send events too: listen at `listen.host`
    side_channel_port: OwnPort = 8200  # where peers' engines get NIXL metadata
    startup_timeout_seconds: Positive = 3600  # a model and its warm-up; then it is started again
    command: tuple[str, ...] = ()  # empty = another container runs it
    env: dict[str, str] = msgspec.field(default_factory=dict)
    allow_unknown_version: bool = False
    tagged_version: str = ""  # what the engine's image says that it is; empty = nothing
    adapters: dict[str, str] = msgspec.field(default_factory=dict)  # folders, by name
    max_lora_rank: Positive = 16

    def check_ports(self, num_ranks: int) -> None:
        """Raise ValueError where two of its ports are one."""
        firsts = {
            "port": (self.port, 1),
            "kvEventsPort": (self.kv_events_port, num_ranks),
            "sideChannelPort": (self.side_channel_port, num_ranks),
        }
        taken: dict[int, str] = {}
        for name, (first, number) in firsts.items():
            for port in range(first, first + number):
                if (other := taken.setdefault(port, name)) != name:
                    raise ValueError(
                        f"vllm.{name} ({first}) and vllm.{other} ({firsts[other][0]}) both take "
                        f"{port}, since each of {num_ranks} ranks has a port behind the first one: "
                        "move them apart"
                    )


def pdcluster_only_fields(engine: msgspec.Struct) -> Iterator[str]:
    """Names, as in the file, of given fields that a stock engine does not read."""
    for field in msgspec.structs.fields(engine):
        if field.name in OURS_ALONE and getattr(engine, field.name) != field.default:
            yield field.encode_name


KV_TIER_ORDERS = (
    *(["host"], ["disk"], ["host", "disk"]),
    *(["host", "shared"], ["host", "disk", "shared"]),
)


class KvTierConfig(Section, frozen=True):
    """A tier below the KV blocks.  path: a folder; url: a server, in its place."""

    type: Literal["host", "disk", "shared"]
    size: Natural = 0  # bytes; 0 = of a server, which has its own limit
    path: str | None = None
    url: str | None = None
    password_file: str | None = None

    def __post_init__(self) -> None:
        if (self.type == "host") == bool(self.path or self.url):
            raise ValueError(
                "path is for tiers of type disk and shared, which need it: give the folder of a "
                "disk or of a shared volume with those types, or leave it out"
            )
        if self.url and (self.type != "shared" or self.path):
            raise ValueError("url is for type shared without a path: leave url or path out")
        if bool(self.size) == bool(self.url):
            raise ValueError(
                "size is for tiers without a url, which need it: give at least 1 byte, or leave it "
                "out and set maxmemory of the server"
            )


KvCacheDtype = Literal["auto", "bf16", "fp8_e4m3", "int8"]
WeightQuantization = Literal["none", "int8", "fp8_e4m3"]

Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKER_RANKS)]


class EngineConfig(Section, frozen=True):
    type: Literal["pdcluster", "vllm", "sglang"] = "pdcluster"
    vllm: VllmConfig = VllmConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto = by the pool's accelerator
    block_size: Positive = 16
    # up to more than the longest context of any model, for schedulers of whole prompts
    max_batched_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 256
    # each has a row of block tables
    max_sequences: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 64
    max_model_len: Positive | None = None  # None = what the model and the KV cache allow
    prefix_caching: bool = True
    kv_cache_dtype: KvCacheDtype = "auto"  # auto = the model's
    quantization: WeightQuantization = "none"  # of weights that the checkpoint has not quantized
    allow_mixed_precision: bool = False  # pair with workers whose weights have another one
    kv_cache_memory: Positive = 1 << 30  # ignored with num_blocks
    device_memory_share: Share | None = None  # for weights, KV blocks and steps of a GPU
    num_blocks: Positive | None = None
    kv_tiers: tuple[KvTierConfig, ...] | None = None  # the fastest first
    # 0 = from the cgroup limit; each has a stack and waits at every barrier
    threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    data_parallel_size: Ranks = 1
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
    chunk_schedule: ChunkSchedule | None = None
    # share of KV blocks left free
    admission_watermark: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    tensor_parallel_size: Ranks = 1
    pipeline_parallel_size: Ranks = 1
    prefill_delayer: DelayerSettings | None = None  # prefill and mixed workers only
    speculation: SpeculationSettings | None = None  # decode and mixed workers only

    def __post_init__(self) -> None:
        if self.is_stock and (given := list(pdcluster_only_fields(self))):
            raise ValueError(
                f"{given[0]} is for engine type pdcluster, not {self.type}: leave it out, or say "
                "it in the engine's own arguments"
            )
        if self.type == "pdcluster" and self.data_parallel_size > MAX_ENGINES:
            raise ValueError(
                f"dataParallelSize must be at most {MAX_ENGINES}, not {self.data_parallel_size}, "
                "but for engine type vllm: lower it"
            )
        limit = MAX_RANKS if self.type == "pdcluster" else MAX_WORKER_RANKS
        if self.num_ranks > limit:
            engines = self.data_parallel_size
            times = f" times dataParallelSize ({engines})" if self.is_stock else ""
            raise ValueError(
                f"tensorParallelSize ({self.tensor_parallel_size}) times pipelineParallelSize "
                f"({self.pipeline_parallel_size}){times} is {self.num_ranks} "
                f"ranks, over the {limit} of one worker: lower one of them"
            )
        if self.is_stock:
            self.vllm.check_ports(self.data_parallel_size)
            return  # it checks its own sizes
        # a step must have room for one token of each
        if self.max_batched_tokens < self.max_sequences:
            raise ValueError(
                f"maxBatchedTokens ({self.max_batched_tokens}) must be at least maxSequences "
                f"({self.max_sequences})"
            )
        self._check_tiers()
        scheduler, most = self.scheduler_settings, self.max_model_len
        wrong = wrong_fields(scheduler, self.max_batched_tokens)
        if not wrong and most is not None:
            wrong = wrong_sizes(scheduler, self.max_batched_tokens, most)
        if wrong:
            raise ValueError(wrong)

    def _check_tiers(self) -> None:
        types = [tier.type for tier in self.kv_tiers or ()]
        if types and types not in KV_TIER_ORDERS:
            raise ValueError(
                "kvTiers must be host, disk and shared in that order, each once at most, and "
                "shared with a host: leave the list or a tier out, or change their order"
            )
        if self.kv_tiers and not self.prefix_caching:
            raise ValueError(
                "kvTiers holds cached prefixes, and prefixCaching is false: leave one of them out"
            )

    @property
    def host_tier_bytes(self) -> int:
        return sum(tier.size for tier in self.kv_tiers or () if tier.type == "host")

    @property
    def is_stock(self) -> bool:
        return self.type != "pdcluster"

    @property
    def num_ranks(self) -> int:
        """Rank processes with a device each; engines of ours in one worker share theirs."""
        engines = self.data_parallel_size if self.is_stock else 1
        return self.tensor_parallel_size * self.pipeline_parallel_size * engines

    @property
    def drafts(self) -> SpeculationSettings | None:
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
        milliseconds = self.tbt_slo_milliseconds
        return SchedulerSettings(
            name=self.scheduler,
            policy=self.scheduling_policy,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            chunked_prefill=self.chunked_prefill,
            tbt_slo_seconds=None if milliseconds is None else milliseconds / 1000.0,
            chunk_schedule=self.chunk_schedule,
        )
