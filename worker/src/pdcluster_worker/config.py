"""The worker's two files and its identity, parsed and checked once.

The engine file is immutable for a revision; the policy file is hot-reloaded
(`load_policy` raises ConfigError and the caller keeps the last good one).
Unknown fields of the engine file are refused by path.  Those of the policy
file are named in a warning and ignored: an operator that is newer than a
revision's image renders more of them.  Keys are camelCase in YAML.  The
operator writes both files from the PDCluster object; `tests/contract` holds
the two sides to the same names.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
import yaml

from pdcluster_worker.config_section import Natural, PolicySection, Port, Positive, Section, Share
from pdcluster_worker.engine.settings import (
    ChunkSchedule,
    SchedulerName,
    SchedulerSettings,
    SchedulingPolicy,
    wrong_fields,
    wrong_sizes,
)
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.http_config import CorsPolicy, HttpLimitsPolicy
from pdcluster_worker.model_config import ModelConfig
from pdcluster_worker.moving_config import MovingPolicy, RacingPolicy
from pdcluster_worker.qos_config import (
    DegradationPolicy,
    EarlyRejectionPolicy,
    EstimationPolicy,
    HighPriorityPolicy,
    LowPriorityPolicy,
    SloPolicy,
    TenantPolicy,
)
from pdcluster_worker.routing_config import CreditPolicy, DecodeScorePolicy, OffloadPolicy, PrefillQueuePolicy, PrefillScorePolicy
from pdcluster_worker.speculation_config import SpeculationConfig

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode", "mixed", "router"]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=8)]
MAX_RANKS = 8
"""Most ranks of one engine: the accelerators of one machine."""

MAX_ENGINES = 8
"""Engine processes of one worker at most: each has a KV port of its own, from `listen.kv` on."""

ALL_OF_IPV4, ALL_ADDRESSES = "0.0.0.0", "::"
NO_ACCELERATOR = "cpu"  # the `gpu` of a pool whose workers have none


SectionT = TypeVar("SectionT", bound=Section)


class ChunkScheduleConfig(Section, frozen=True):
    """Chunk sizes of a prompt, see `engine.settings.ChunkSchedule`."""

    low: Positive
    high: Positive
    stages: Annotated[int, msgspec.Meta(ge=1, le=64)]
    max_tokens: Positive

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"chunkSchedule: low ({self.low}) must be at most high ({self.high})")


class PrefillDelayerConfig(Section, frozen=True):
    """Bounds within which new prompts are held back to be prefilled together; see `engine.prefill_delayer`.

    token_usage_low_watermark: below that share of used KV blocks none is held back; None = off.
    queue_min_ratio:           prompts wait until so many do, as a share of the requests that run; None = off.
    """

    enabled: bool = True
    max_delay_passes: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 30
    max_delay_milliseconds: Annotated[int, msgspec.Meta(ge=1, le=600_000)] = 5000
    token_usage_low_watermark: Share | None = None
    queue_min_ratio: Share | None = None


class EngineConfig(Section, frozen=True):
    """Sizes of the engine; see `engine.core` and `model.runner` for their effect.

    device:              what it computes on; auto = cuda where the pool has an accelerator, else cpu.
    max_model_len:       longest prompt + output in tokens, refused where the KV pool does not hold it; None = the model's own limit,
                         or what the pool holds where that is less.
    kv_cache_memory:     bytes for KV blocks; ignored when num_blocks is given.
    device_memory_share: of a GPU's memory, for weights, KV blocks and steps together; takes the place of kv_cache_memory there.
    threads:             CPU threads of the model; 0 = from the cgroup limit.
    data_parallel_size:  engine processes of this worker, which share its threads, KV memory and transfer bandwidth (`data_parallel`).
    transfer_bandwidth:  most bytes per second that this worker sends of KV; 0 = no limit.
    fence_timeout_seconds: a fence older than this is reported overdue (its blocks stay quarantined).
    admission_watermark: share of the KV blocks left free by an admission beside others [V7].
    batch_invariant:     a request's bits do not depend on what else is computed, cached or not, here or remotely.
    scheduler and the fields below it: see `engine.settings.SchedulerSettings`.
    tensor_parallel_size:   rank processes that share each layer; on GPUs, one accelerator each.
    pipeline_parallel_size: stages of layers, each of so many ranks.
    prefill_delayer:     of a prefill or mixed worker; None = prompts are not held back.
    speculation:         of a decode or mixed worker; None = nothing is drafted.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: Positive = 16
    max_batched_tokens: Positive = 256
    max_sequences: Positive = 64
    max_model_len: Positive | None = None
    prefix_caching: bool = True
    kv_cache_memory: Positive = 1 << 30
    device_memory_share: Share | None = None
    num_blocks: Positive | None = None
    threads: Natural = 0
    data_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_ENGINES)] = 1
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
        if (ranks := self.tensor_parallel_size * self.pipeline_parallel_size) > MAX_RANKS:
            raise ValueError(
                f"tensorParallelSize ({self.tensor_parallel_size}) times pipelineParallelSize ({self.pipeline_parallel_size}) is {ranks} "
                f"ranks, over the {MAX_RANKS} of one worker: lower one of them"
            )
        if self.max_batched_tokens < self.max_sequences:  # [V9]: a step must have room for one token of each
            raise ValueError(f"maxBatchedTokens ({self.max_batched_tokens}) must be at least maxSequences ({self.max_sequences})")
        scheduler, most = self.scheduler_settings, self.max_model_len
        wrong = wrong_fields(scheduler, self.max_batched_tokens)
        if not wrong and most is not None:
            wrong = wrong_sizes(scheduler, self.max_batched_tokens, most)
        if wrong:
            raise ValueError(wrong)
        if self.num_blocks is not None and self.num_blocks < self.data_parallel_size:
            raise ValueError(
                f"numBlocks ({self.num_blocks}) must be at least dataParallelSize ({self.data_parallel_size}): engines share them"
            )

    @property
    def drafts(self) -> SpeculationConfig | None:
        """Settings of drafting; None = tokens are not drafted."""
        own = self.speculation
        return None if own is None or own.method == "Off" else own

    @property
    def max_decode_rows(self) -> int:
        """Rows of the largest step of decodes and their drafts."""
        num_drafts = 0 if self.drafts is None else self.drafts.num_tokens
        return max(self.max_sequences, min(self.max_batched_tokens, self.max_sequences * (1 + num_drafts)))

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
            chunk_schedule=None if chunks is None else ChunkSchedule(**msgspec.structs.asdict(chunks)),
        )


class ListenConfig(Section, frozen=True):
    """Addresses to listen on; port 0 = any free port, announced in etcd.

    head:     where headless engines on other hosts join (docs/parallel.md); None = none may
    api_keys: folder of files that each hold one key which clients may present; None = no key is asked for
    """

    host: str = ALL_OF_IPV4
    http: Port = 8000
    grpc: Port = 9000
    kv: Port = 9100
    head: Port | None = None
    api_keys: str | None = None


class EtcdTLSConfig(Section, frozen=True):
    """PEM files for an etcd that speaks TLS; certificate and key only where it asks clients for one."""

    ca: str
    certificate: str | None = None
    key: str | None = None


class DiscoveryConfig(Section, frozen=True):
    """etcd endpoints as host:port, TLS to them (None = plain), and the lease of this worker's record."""

    endpoints: Annotated[list[str], msgspec.Meta(min_length=1)]
    tls: EtcdTLSConfig | None = None
    lease_seconds: Positive = 10


class TLSConfig(Section, frozen=True):
    """PEM files: the cluster's CA, this worker's certificate and key."""

    ca: str
    certificate: str
    key: str


class WorkerConfig(Section, frozen=True):
    """The engine file."""

    cluster: str
    revision: str
    role: Role
    pool: str
    model: ModelConfig
    discovery: DiscoveryConfig
    tls: TLSConfig
    gpu: str = NO_ACCELERATOR
    engine: EngineConfig = EngineConfig()
    listen: ListenConfig = ListenConfig()

    def __post_init__(self) -> None:
        delayer = self.engine.prefill_delayer
        if self.role in ("decode", "router") and delayer is not None and delayer.enabled:
            raise ValueError(
                f"engine.prefillDelayer is for prefill and mixed workers, not for {self.role}: remove it or set enabled: false"
            )
        if self.role in ("prefill", "router") and self.engine.drafts is not None:
            raise ValueError(f'engine.speculation is for decode and mixed workers, not for {self.role}: remove it or set method: "Off"')
        if self.role == "router" and self.gpu != NO_ACCELERATOR:
            raise ValueError(f"gpu: {self.gpu} is not for a router, which has no engine: remove it")


class AdmissionPolicy(PolicySection, frozen=True):
    """Bounds of the ingress; beyond them a request is answered 503 (queue, [V8]) or 413 (body).

    max_queued_requests: that wait for their first token.
        One request has at most as many generations (prompts times n).
    max_queued_tokens:   of their prompts, in all; 0 = no bound.
    worker_wait_seconds: a request waits at a router for so long while no decode worker takes new work; 0 = is refused at once.
    """

    max_queued_requests: Positive = 1024
    max_queued_tokens: Natural = 0
    max_body_bytes: Positive = 4 << 20
    worker_wait_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=600.0)] = 0.0


class PolicyConfig(PolicySection, frozen=True):
    """The policy file.

    shared_prefix_cache: all API keys share cached blocks; otherwise each key has its own.
    stall_seconds: time beyond its longest step for which an engine may make no progress.
    allow_client_priority: whether a request's `priority` counts; any other than 0 is refused where it does not.
    tenants: limits by the name of the file that holds the API key; tenant_defaults: of all others.
    """

    offload: OffloadPolicy = OffloadPolicy()
    prefill_score: PrefillScorePolicy = PrefillScorePolicy()
    prefill_queue: PrefillQueuePolicy = PrefillQueuePolicy()
    credits: CreditPolicy = CreditPolicy()
    decode_score: DecodeScorePolicy = DecodeScorePolicy()
    admission: AdmissionPolicy = AdmissionPolicy()
    slo: SloPolicy = SloPolicy()
    early_rejection: EarlyRejectionPolicy = EarlyRejectionPolicy()
    high_priority: HighPriorityPolicy = HighPriorityPolicy()
    low_priority: LowPriorityPolicy = LowPriorityPolicy()
    degradation: DegradationPolicy = DegradationPolicy()
    estimation: EstimationPolicy = EstimationPolicy()
    tenant_defaults: TenantPolicy = TenantPolicy()
    tenants: dict[str, TenantPolicy] = msgspec.field(default_factory=dict)
    shared_prefix_cache: bool = False
    stall_seconds: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 20
    allow_client_priority: bool = False
    moving: MovingPolicy = MovingPolicy()
    racing: RacingPolicy = RacingPolicy()
    cors: CorsPolicy = CorsPolicy()
    http_limits: HttpLimitsPolicy = HttpLimitsPolicy()


class Identity(msgspec.Struct, frozen=True):
    """Identity of this worker, from the downward API (or `pdctl`)."""

    pod: str
    namespace: str
    address: str  # what peers connect to

    @classmethod
    def from_env(cls) -> "Identity":
        """Read POD_NAME, POD_NAMESPACE and POD_IP; raises ConfigError naming the missing one."""
        values = {name: os.environ.get(name, "") for name in ("POD_NAME", "POD_NAMESPACE", "POD_IP")}
        missing = [name for name, value in values.items() if not value]
        if missing:
            raise ConfigError(f"environment variable {missing[0]} is not set: set it from the downward API, or start the worker with pdctl")
        return cls(pod=values["POD_NAME"], namespace=values["POD_NAMESPACE"], address=values["POD_IP"])


def load_worker_config(path: Path) -> WorkerConfig:
    """Read the engine file.  Raises ConfigError with the file, the field's path and the reason.

    Where this worker's address (POD_IP) is of IPv6, "all addresses" are those of both families.
    """
    config = _convert(path, _without_retired(_document(path)), WorkerConfig)
    if config.listen.host == ALL_OF_IPV4 and ":" in os.environ.get("POD_IP", ""):
        return msgspec.structs.replace(config, listen=msgspec.structs.replace(config.listen, host=ALL_ADDRESSES))
    return config


def load_policy(path: Path) -> PolicyConfig:
    """Read the policy file.  Raises ConfigError with the file, the field's path and the reason; unknown fields are logged."""
    document = _document(path)
    policy = _convert(path, document, PolicyConfig)
    unknown = list(_unknown_fields(document, PolicyConfig))
    if unknown:
        logger.warning("ignored unknown fields of the policy, applied the others path=%s fields=%s", path, ",".join(unknown))
    return policy


def _document(path: Path) -> Any:
    try:
        content = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from e
    try:
        return yaml.safe_load(content) or {}
    except Exception as e:  # not only YAMLError: ValueError of a date that is none, RecursionError, KeyError of a tagged value
        raise ConfigError(f"{path}: not YAML: {e}") from e


_RETIRED: Mapping[str, Mapping[str, Any]] = {
    "": {"tensorParallel": 1},
    "engine": {"kvCacheDtype": "auto", "transport": "tcp"},
}
"""Fields that had one value, by section.  The engine file of a workload is never rendered again, so an older one has them."""


def _without_retired(document: Any) -> Any:
    """The document without retired fields that say what is so anyway; any other value of theirs is an unknown field."""
    if not isinstance(document, dict):
        return document
    kept = {name: value for name, value in document.items() if _RETIRED[""].get(name) != value}
    engine = kept.get("engine")
    if isinstance(engine, dict):
        kept["engine"] = {name: value for name, value in engine.items() if _RETIRED["engine"].get(name) != value}
    return kept


def _convert(path: Path, document: Any, kind: type[SectionT]) -> SectionT:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{path}: {e}") from e


def _unknown_fields(document: Mapping[str, Any], kind: type[Section], prefix: str = "") -> Iterator[str]:
    """Paths of the fields that a section of `kind` does not have, in a document that was converted to it."""
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in document.items():
        if name not in known:
            yield f"{prefix}{name}"
        elif isinstance(value, Mapping) and (section := _section_in(known[name])) is not None:
            entries = {f"{name}.{key}": entry for key, entry in value.items()} if get_origin(known[name]) is dict else {name: value}
            for path, entry in entries.items():
                yield from _unknown_fields(entry, section, f"{prefix}{path}.")


def _section_in(kind: Any) -> type[Section] | None:
    """The section that a field is, may be, or maps names to; None of a field of plain values."""
    kinds = (kind, *get_args(kind))
    return next((each for each in kinds if isinstance(each, type) and issubclass(each, Section)), None)
