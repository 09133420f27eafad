"""The worker's two files and its identity, parsed and checked once.

The engine file is immutable for a revision; the policy file is hot-reloaded
(`load_policy` raises ConfigError and the caller keeps the last good one).
Unknown fields of the engine file are refused by path.  Those of the policy
file are named in a warning and passed over: an operator that is newer than a
revision's image renders more of them.  Keys are camelCase in YAML.  The
operator writes both files from the PDCluster object; `tests/contract` holds
the two sides to the same names.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml

from pdcluster_worker.errors import ConfigError

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode", "mixed"]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Weight = Annotated[float, msgspec.Meta(ge=0.0)]

ALL_OF_IPV4, ALL_ADDRESSES = "0.0.0.0", "::"
NO_ACCELERATOR = "cpu"  # the `gpu` of a pool whose workers have none


class _Section(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: frozen, camelCase, no unknown field."""


class _PolicySection(_Section, frozen=True, forbid_unknown_fields=False):
    """Base of the policy's sections."""


SectionT = TypeVar("SectionT", bound=_Section)


class ModelConfig(_Section, frozen=True):
    """Which model.  dtype: auto = one for all workers of the revision (`peers.dtype`)."""

    name: str
    path: str
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class EngineConfig(_Section, frozen=True):
    """Sizes of the engine; see `engine.core` and `model.runner` for their effect.

    device:              what it computes on; auto = cuda where the pool has an accelerator, else cpu.
    max_model_len:       longest prompt + output in tokens, refused where the KV pool does not hold it; None = the model's own limit,
                         or what the pool holds where that is less.
    kv_cache_memory:     bytes for KV blocks; ignored when num_blocks is given.
    device_memory_share: of a GPU's memory, for weights, KV blocks and steps together; takes the place of kv_cache_memory there.
    threads:             CPU threads of the model; 0 = from the cgroup limit.
    transfer_bandwidth:  most bytes per second that this worker sends of KV; 0 = no limit.
    fence_timeout_seconds: a fence older than this is reported overdue (its blocks stay quarantined).
    batch_invariant:     a request's bits do not depend on what else is computed, cached or not, here or remotely.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: Positive = 16
    max_batched_tokens: Positive = 256
    max_sequences: Positive = 64
    max_model_len: Positive | None = None
    prefix_caching: bool = True
    kv_cache_memory: Positive = 1 << 30
    device_memory_share: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    num_blocks: Positive | None = None
    threads: Natural = 0
    transfer_bandwidth: Natural = 0
    verify_transfers: bool = False
    fence_timeout_seconds: Annotated[float, msgspec.Meta(gt=0.0)] = 30.0
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.max_batched_tokens < self.max_sequences:  # [V9]: a step must have room for one token of each
            raise ValueError(f"maxBatchedTokens ({self.max_batched_tokens}) must be at least maxSequences ({self.max_sequences})")


class ListenConfig(_Section, frozen=True):
    """Where to listen; port 0 = any free port, announced in etcd.

    api_keys: folder of files that each hold one key which clients may present; None = no key is asked for
    """

    host: str = ALL_OF_IPV4
    http: Port = 8000
    grpc: Port = 9000
    kv: Port = 9100
    api_keys: str | None = None


class EtcdTLSConfig(_Section, frozen=True):
    """PEM files for an etcd that speaks TLS; certificate and key only where it asks clients for one."""

    ca: str
    certificate: str | None = None
    key: str | None = None


class DiscoveryConfig(_Section, frozen=True):
    """etcd endpoints as host:port, TLS to them (None = plain), and the lease of this worker's record."""

    endpoints: Annotated[list[str], msgspec.Meta(min_length=1)]
    tls: EtcdTLSConfig | None = None
    lease_seconds: Positive = 10


class TLSConfig(_Section, frozen=True):
    """PEM files: the cluster's CA, this worker's certificate and key."""

    ca: str
    certificate: str
    key: str


class WorkerConfig(_Section, frozen=True):
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


class OffloadPolicy(_PolicySection, frozen=True):
    """Numbers of the offload decision [O1]."""

    prefill_length_threshold: Natural = 256
    prefill_queue_max: Natural = 10
    decode_load_threshold: Natural = 8
    min_offload_length: Natural = 64


class PrefillScorePolicy(_PolicySection, frozen=True):
    """Choice among prefill workers with credit: lowest load_weight * queued tokens - prefix_weight * matched tokens."""

    prefix_weight: Weight = 1.0
    load_weight: Weight = 1.0


class CreditPolicy(_PolicySection, frozen=True):
    """How far ahead of its engine a prefill worker accepts work: tokens = batches_ahead * maxBatchedTokens."""

    batches_ahead: Annotated[float, msgspec.Meta(gt=0.0, le=1000.0)] = 2.0


class AdmissionPolicy(_PolicySection, frozen=True):
    """Bounds of the ingress; beyond them a request is answered 503 (queue) or 413 (body).

    One request has at most max_queued_requests generations (prompts times n).
    """

    max_queued_requests: Positive = 1024
    max_body_bytes: Positive = 4 << 20


class PolicyConfig(_PolicySection, frozen=True):
    """The policy file.

    shared_prefix_cache: all API keys share cached blocks; otherwise each key has its own.
    stall_seconds: time beyond its longest step for which an engine may stand still.
    allow_client_priority: whether a request's `priority` counts; any other than 0 is refused where it does not.
    """

    offload: OffloadPolicy = OffloadPolicy()
    prefill_score: PrefillScorePolicy = PrefillScorePolicy()
    credits: CreditPolicy = CreditPolicy()
    admission: AdmissionPolicy = AdmissionPolicy()
    shared_prefix_cache: bool = False
    stall_seconds: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 20
    allow_client_priority: bool = False


class Identity(msgspec.Struct, frozen=True):
    """Who this worker is, from the downward API (or `pdctl`)."""

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
        logger.warning("passed over unknown fields of the policy, the others are taken path=%s fields=%s", path, ",".join(unknown))
    return policy


def _document(path: Path) -> Any:
    try:
        content = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from e
    try:
        return yaml.safe_load(content) or {}
    except Exception as e:  # besides YAMLError: ValueError of a date that is none, RecursionError, KeyError of a tagged value
        raise ConfigError(f"{path}: not YAML: {e}") from e


_RETIRED: Mapping[str, Mapping[str, Any]] = {
    "": {"tensorParallel": 1},
    "engine": {"scheduler": "continuous", "kvCacheDtype": "auto", "transport": "tcp"},
}
"""Fields that had one value, by section.  The engine file of a workload is never rendered anew: one that is older has them."""


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


def _unknown_fields(document: Mapping[str, Any], kind: type[_Section], prefix: str = "") -> Iterator[str]:
    """Paths of the fields that a section of `kind` does not have, in a document that was converted to it."""
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in document.items():
        section = known.get(name)
        if section is None:
            yield f"{prefix}{name}"
        elif isinstance(value, Mapping):
            yield from _unknown_fields(value, section, f"{prefix}{name}.")
