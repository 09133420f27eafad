"""The worker's two files: the engine file (fixed for a revision) and the policy file (hot-
reloaded). An older image refuses unknown fields of the engine file, so defaults are left out of it.
"""

from dataclasses import dataclass, fields
from typing import Any

from pdcluster_api.manifests.vllm import IN_CONTAINER, VllmSettings, vllm_command, vllm_environment
from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.pdcluster import PDCluster, PDClusterSpec
from pdcluster_schema.ports import GRPC_PORT, HTTP_PORT, KV_PORT
from pdcluster_schema.revision import revision_of
from pdcluster_schema.section import SpecSection
from pdcluster_schema.sections import PoolSpec
from pdcluster_schema.vllm_engine import VLLM


@dataclass(frozen=True)
class EtcdTls:
    """PEM files for an etcd that speaks TLS; certificate and key where it asks for them."""

    ca: str
    certificate: str | None = None
    key: str | None = None


@dataclass(frozen=True)
class WorkerFileSettings:
    """Values of a worker's place and not of the spec (port 0 = any)."""

    model_path: str
    etcd_endpoints: tuple[str, ...]
    ca: str
    certificate: str
    key: str
    host: str = "0.0.0.0"
    http_port: int = HTTP_PORT
    grpc_port: int = GRPC_PORT
    kv_port: int = KV_PORT
    etcd_tls: EtcdTls | None = None
    # folder of files that each hold one key which clients may present; None = no key is asked for
    api_keys: str | None = None
    vllm: VllmSettings = IN_CONTAINER  # where a stock engine listens


_LISTEN = {
    "host": "host",
    "http_port": "http",
    "grpc_port": "grpc",
    "kv_port": "kv",
    "api_keys": "apiKeys",
}

_VLLM_PORTS = {"http": "port", "kv_events": "kvEventsPort", "side_channel": "sideChannelPort"}
# Fields that the server process of a stock engine has to know; the others are flags alone
_VLLM_FACTS = {
    "type",
    "block_size",
    "max_batched_tokens",
    "max_sequences",
    "max_model_len",
    "prefix_caching",
    "tensor_parallel_size",
    "pipeline_parallel_size",
}

_VLLM_SIZES = {"maxBatchedTokens": 8192, "maxSequences": 1024}
# vLLM's own where the field is left to it: of each rank on CPUs, and of an H100. It does not say
# which it took. The server process grants credits by them, so too few would leave it one prompt at
# a time; what is too many waits in vLLM's queue.
_VLLM_SIZES_ON_CPU = {"maxBatchedTokens": 2048, "maxSequences": 128}

# Defaults of `qos.stallSeconds`; on an accelerator a step at a new shape may compile kernels
_STALL_SECONDS, _ACCELERATOR_STALL_SECONDS = 20, 120

_OF_MODEL = {"dtype", "chat_template", "tool_parser", "reasoning_parser"}


def engine_file(
    cluster: PDCluster, role: str, pool: PoolSpec, engine: EngineSpec, site: WorkerFileSettings
) -> dict[str, Any]:
    model = cluster.spec.model
    discovery: dict[str, Any] = {"endpoints": list(site.etcd_endpoints)}
    if site.etcd_tls:
        discovery["tls"] = _set_fields(site.etcd_tls)
    return {
        "cluster": cluster.metadata.name,
        "revision": revision_of(cluster.spec),
        "role": role,
        "pool": pool.name,
        "gpu": pool.gpu,
        "model": {
            "name": model.name,
            "path": site.model_path,
            **model.model_dump(include=_OF_MODEL, by_alias=True, exclude_defaults=True),
        },
        "engine": _engine(cluster, pool, engine, site),
        "discovery": discovery,
        "tls": {"ca": site.ca, "certificate": site.certificate, "key": site.key},
        "listen": {
            _LISTEN[name]: value for name, value in _set_fields(site).items() if name in _LISTEN
        },
    }


def policy_file(cluster: PDCluster) -> dict[str, Any]:
    spec = cluster.spec
    service = spec.service
    policy = {
        **_fields(spec.routing),
        **_fields(spec.qos),
        "stallSeconds": _stall_seconds(spec),
        "sharedPrefixCache": service.shared_prefix_cache,
        "cors": _fields(service.cors),
        "httpLimits": _fields(service.limits),
    }
    thresholds = spec.length_thresholds()
    policy["offload"] |= {
        # Always a number, since workers of an older revision read this file too.
        "prefillLengthThreshold": spec.prefill_length_threshold,
        "lengthThresholds": thresholds if len(set(thresholds.values())) > 1 else {},
    }
    return policy


def _stall_seconds(spec: PDClusterSpec) -> int:
    if spec.qos.stall_seconds is not None:
        return spec.qos.stall_seconds
    on_accelerators = any(
        spec.engine_of(name).computes_on(pool.gpu)
        for name, role in spec.roles.computing().items()
        for pool in role.pools
    )
    return _ACCELERATOR_STALL_SECONDS if on_accelerators else _STALL_SECONDS


def _engine(
    cluster: PDCluster, pool: PoolSpec, engine: EngineSpec, site: WorkerFileSettings
) -> dict[str, Any]:
    if engine.type != VLLM:
        section: dict[str, Any] = engine.sized_for(pool.gpu).model_dump(
            mode="json", by_alias=True, exclude_defaults=True
        )
        return section
    vllm: dict[str, Any] = {
        _VLLM_PORTS[name]: value
        for name, value in _set_fields(site.vllm).items()
        if name in _VLLM_PORTS
    }
    if site.vllm.is_process:
        vllm["command"] = vllm_command(cluster, pool, engine, site.model_path, site.vllm)
        vllm["env"] = vllm_environment(pool, engine, site.vllm)
    return {**_vllm_facts(pool, engine), "vllm": vllm}


def _vllm_facts(pool: PoolSpec, engine: EngineSpec) -> dict[str, Any]:
    """Fields as vLLM has them: each that is given, default or not, is one of its flags too."""
    given: dict[str, Any] = engine.model_dump(
        mode="json", by_alias=True, exclude_unset=True, exclude_none=True, include=_VLLM_FACTS
    )
    if pool.gpu != NO_ACCELERATOR:
        return _VLLM_SIZES | given
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    return {name: size * ranks for name, size in _VLLM_SIZES_ON_CPU.items()} | given


def _set_fields(part: EtcdTls | WorkerFileSettings | VllmSettings) -> dict[str, Any]:
    return {
        field.name: value
        for field in fields(part)
        if (value := getattr(part, field.name)) != field.default
    }


def _fields(section: SpecSection) -> dict[str, Any]:
    fields: dict[str, Any] = section.model_dump(mode="json", by_alias=True)
    return fields
