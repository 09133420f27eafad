"""The worker's files: the engine file (fixed for a revision), the policy file (hot-reloaded) and
the conditions beside it. An older image refuses unknown fields of the engine file, so defaults are
left out of it.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import yaml

from pdcluster_api.manifests.model_source import adapter_path, on_volume
from pdcluster_api.manifests.objects import (
    API_KEYS_FOLDER,
    ENGINE_FILE,
    ETCD_CLIENT_PORT,
    ETCD_TLS_FOLDER,
    KV_STORE_FOLDER,
    LOGGING_FILE,
    POLICY_FILE,
    TLS_FOLDER,
    Manifest,
    Owner,
    child_names,
    shared_object,
)
from pdcluster_api.manifests.stock import stock_command, stock_environment
from pdcluster_api.manifests.vllm import (
    IN_CONTAINER,
    VllmSettings,
    max_lora_rank,
    pods_of,
    vllm_logging,
)
from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.model import ModelSpec
from pdcluster_schema.pdcluster import PDCluster, PDClusterSpec
from pdcluster_schema.ports import GRPC_PORT, HEAD_PORT, HTTP_PORT, KV_PORT, PICKER_PORT
from pdcluster_schema.revision import revision_of
from pdcluster_schema.section import SpecSection
from pdcluster_schema.sections import ENGINELESS, ROUTER, PoolSpec
from pdcluster_schema.stock_engine import VLLM
from pdcluster_schema.stock_versions import published_version


@dataclass(frozen=True)
class WorkerFileSettings:
    """Values of a worker's place and not of the spec (port 0 = any)."""

    model_path: str
    etcd_endpoints: tuple[str, ...]
    ca: str
    certificate: str
    key: str
    host: str = "0.0.0.0"
    http_host: str | None = None  # where HTTP alone is served; None = at `host`
    http_port: int = HTTP_PORT
    grpc_port: int = GRPC_PORT
    kv_port: int = KV_PORT
    head_port: int | None = None  # where engines of the worker's other pods join
    num_headless: int = 0  # that are waited for at the start
    picker_port: int = PICKER_PORT
    # PEM files for an etcd that speaks TLS: ca, and certificate and key where it asks for them
    etcd_tls: Mapping[str, str] = field(default_factory=dict)
    # folder of files that each hold one key which clients may present; None = no key is asked for
    api_keys: str | None = None
    kv_store: str | None = None  # folder with the password of a shared tier's server
    vllm: VllmSettings = IN_CONTAINER  # where a stock engine listens


_LISTEN = {
    "host": "host",
    "http_host": "httpHost",
    "http_port": "http",
    "grpc_port": "grpc",
    "kv_port": "kv",
    "head_port": "head",
    "num_headless": "headless",
    "picker_port": "picker",
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
    "data_parallel_size",
}

_VLLM_SIZES = {"maxBatchedTokens": 8192, "maxSequences": 1024}
# vLLM's own where the field is left to it: of each rank on CPUs, and of an H100. It does not say
# which it took. The server process grants credits by them, so too few would leave it one prompt at
# a time; what is too many waits in vLLM's queue.
_VLLM_SIZES_ON_CPU = {"maxBatchedTokens": 2048, "maxSequences": 128}

# Defaults of `qos.stallSeconds`; on an accelerator a step at a new shape may compile kernels
_STALL_SECONDS, _ACCELERATOR_STALL_SECONDS = 20, 120

_OF_MODEL = {"dtype", "chat_template", "tool_parser", "reasoning_parser", "frontend"}


def etcd_endpoints(cluster: PDCluster) -> tuple[str, ...]:
    """host:port of the etcd that the workers use: the given ones, or the managed one's Service."""
    given = cluster.spec.discovery.etcd.endpoints
    return given or (
        f"{cluster.metadata.name}-etcd.{cluster.metadata.namespace}.svc:{ETCD_CLIENT_PORT}",
    )


def answers_clients(cluster: PDCluster, role: str) -> bool:
    return role in (ROUTER, cluster.spec.decode_role)


def requires_keys(cluster: PDCluster, role: str) -> bool:
    """True if workers of a role check API keys: also those that load adapters for clients."""
    has_clients = answers_clients(cluster, role) or loads_adapters(cluster, role)
    return cluster.spec.service.api_key_secret is not None and has_clients


def loads_adapters(cluster: PDCluster, role: str) -> bool:
    """True if engines of a role load adapters while they run."""
    return cluster.spec.model.runtime_adapters is not None and role not in ENGINELESS


def engine_config(
    cluster: PDCluster, role: str, pool: PoolSpec, model_path: str, *, etcd_client_certificate: bool
) -> Manifest:
    """Files of a workload's engine ConfigMap, with the paths that its pods have."""
    own, etcd_tls = _certificate_files(TLS_FOLDER), dict[str, str]()
    if cluster.spec.discovery.etcd.tls_secret is not None:
        etcd_tls = _certificate_files(ETCD_TLS_FOLDER)
        if not etcd_client_certificate:
            etcd_tls = {"ca": etcd_tls["ca"]}
    engine, num_pods = cluster.spec.engine_of(role), cluster.spec.pods_per_replica(role, pool)
    is_head = num_pods > 1 and not engine.is_stock
    if is_head:  # one engine in each pod
        engine = engine.model_copy(update={"data_parallel_size": 1})
    site = WorkerFileSettings(
        model_path=model_path,
        etcd_endpoints=etcd_endpoints(cluster),
        ca=own["ca"],
        certificate=own["certificate"],
        key=own["key"],
        etcd_tls=etcd_tls,
        api_keys=API_KEYS_FOLDER if requires_keys(cluster, role) else None,
        kv_store=KV_STORE_FOLDER,
        head_port=HEAD_PORT if is_head else None,
        num_headless=num_pods - 1 if is_head else 0,
    )
    draft = engine.speculation and engine.speculation.draft_model
    if engine.speculation and draft and cluster.spec.model.pvc:
        in_pod = engine.speculation.model_copy(update={"draft_model": on_volume(draft)})
        engine = engine.model_copy(update={"speculation": in_pod})
    files = {ENGINE_FILE: yaml_text(engine_file(cluster, role, pool, engine, site))}
    return {**files, LOGGING_FILE: vllm_logging(engine)} if engine.type == VLLM else files


def _certificate_files(folder: str) -> dict[str, str]:
    return {
        "ca": f"{folder}/ca.crt",
        "certificate": f"{folder}/tls.crt",
        "key": f"{folder}/tls.key",
    }


def policy_config(cluster: PDCluster, owner: Owner) -> Manifest:
    data = {POLICY_FILE: yaml_text(policy_file(cluster))}
    return shared_object("v1/ConfigMap", child_names(owner.name).policy, owner, data=data)


def conditions_file(conditions: Iterable[Mapping[str, Any]], written: str) -> str:
    """The conditions of a status, beside the policy file.  written: now, RFC 3339"""
    names = ("type", "status", "reason", "message")
    items = [
        {**{name: each[name] for name in names}, "since": each["lastTransitionTime"]}
        for each in conditions
    ]
    return json.dumps({"written": written, "items": items})


def engine_file(
    cluster: PDCluster, role: str, pool: PoolSpec, engine: EngineSpec, site: WorkerFileSettings
) -> dict[str, Any]:
    model = cluster.spec.model
    discovery: dict[str, Any] = {"endpoints": list(site.etcd_endpoints)}
    if site.etcd_tls:
        discovery["tls"] = dict(site.etcd_tls)
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
            **_adapters(cluster, role),
        },
        "engine": _engine_section(cluster, role, pool, engine, site),
        "discovery": discovery,
        "tls": {"ca": site.ca, "certificate": site.certificate, "key": site.key},
        "listen": _changed(site, _LISTEN),
    }


def _adapters(cluster: PDCluster, role: str) -> dict[str, Any]:
    """Names, which every worker knows, and the folders where our own engine loads them."""
    model, found = cluster.spec.model, dict[str, Any]()
    if model.adapters:
        found["adapters"] = [each.name for each in model.adapters]
        if role not in ENGINELESS and not cluster.spec.engine.is_stock:
            found["adapterPaths"] = _adapter_paths(model)
    if model.runtime_adapters is not None and loads_adapters(cluster, role):
        given = model.runtime_adapters
        path = given.path if model.pvc is None else on_volume(given.path)
        found["runtimeAdapters"] = {"path": path, "memory": given.memory}
    return found


def _adapter_paths(model: ModelSpec) -> dict[str, str]:
    return {each.name: adapter_path(model, each) for each in model.adapters}


def service_addresses(cluster: PDCluster) -> dict[str, str]:
    """host:port of the Service of each of `service.models`, by name."""
    return {
        model.name: f"{model.cluster}.{cluster.metadata.namespace}.svc:{model.port}"
        for model in cluster.spec.service.models
    }


def policy_file(cluster: PDCluster, models: Mapping[str, str] | None = None) -> dict[str, Any]:
    """models: addresses of `service.models`; None = their Services'"""
    spec = cluster.spec
    policy = {
        **_fields(spec.routing),
        **_fields(spec.qos),
        "stallSeconds": _stall_seconds(spec),
        "sharedPrefixCache": spec.service.shared_prefix_cache,
        "cors": _fields(spec.service.cors),
        "httpLimits": _fields(spec.service.limits),
        "models": service_addresses(cluster) if models is None else dict(models),
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


def _engine_section(
    cluster: PDCluster, role: str, pool: PoolSpec, engine: EngineSpec, site: WorkerFileSettings
) -> dict[str, Any]:
    if not engine.is_stock:
        section: dict[str, Any] = engine.sized_for(pool.gpu).model_dump(
            mode="json", by_alias=True, exclude_defaults=True
        )
        for tier in section.get("kvTiers", ()):
            if tier.pop("passwordSecret", None) and site.kv_store:
                tier["passwordFile"] = f"{site.kv_store}/password"
        return section
    vllm = _changed(site.vllm, _VLLM_PORTS)
    if engine.data_parallel_size > 1 and pods_of(engine, pool, site.vllm) > 1:
        vllm["eventsFromPods"] = True
    if engine.allow_unknown_version:
        vllm["allowUnknownVersion"] = True
    declared = cluster.spec.roles.present()[role]
    if declared.startup_timeout_seconds is not None and role not in ENGINELESS:
        vllm["startupTimeoutSeconds"] = declared.startup_timeout_seconds
    version = published_version(engine.image)
    if version and role not in ENGINELESS and not site.vllm.is_process:
        vllm["taggedVersion"] = version
    if cluster.spec.model.adapters and role not in ENGINELESS:
        model = cluster.spec.model
        vllm["adapters"] = _adapter_paths(model)
        if (rank := max_lora_rank(engine.args or ())) is not None:
            vllm["maxLoraRank"] = rank
    if site.vllm.is_process:
        vllm["command"] = stock_command(cluster, pool, engine, site.model_path, site.vllm)
        vllm["env"] = stock_environment(pool, engine, site.vllm, declared.startup_seconds)
    # fields as vLLM has them: each that is given, default or not, is one of its flags too
    given: dict[str, Any] = engine.model_dump(
        mode="json", by_alias=True, exclude_unset=True, exclude_none=True, include=_VLLM_FACTS
    )
    sizes = _VLLM_SIZES
    if pool.gpu == NO_ACCELERATOR:
        ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
        sizes = {name: size * ranks for name, size in _VLLM_SIZES_ON_CPU.items()}
    return {**sizes, **given, "vllm": vllm}


def _changed(part: WorkerFileSettings | VllmSettings, names: Mapping[str, str]) -> dict[str, Any]:
    """Fields that are not as by default, under the names that the file has."""
    return {
        name: value
        for attribute, name in names.items()
        if (value := getattr(part, attribute)) != getattr(type(part), attribute)
    }


def _fields(section: SpecSection) -> dict[str, Any]:
    fields: dict[str, Any] = section.model_dump(mode="json", by_alias=True)
    return fields


# In JSON: characters that it escapes, an empty key, a long key. These libyaml writes otherwise than
# PyYAML's own emitter does; a file of a running pod must not change.
_OWN_WAYS = re.compile(r'\\|"":|"[^"]{100,}":')


def yaml_text(value: Any) -> str:
    return _text(json.dumps(value))


@lru_cache(maxsize=128)
def _text(value: str) -> str:
    """Remembered: every reconcile renders the files, and they rarely change."""
    dumper = _Dumper if _OWN_WAYS.search(value) else _QuickDumper
    return yaml.dump(json.loads(value), Dumper=dumper, sort_keys=False, default_flow_style=False)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


# The base is looked up, since PyYAML may be built without libyaml, and mypy knows no such base.
class _QuickDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """The same text, by libyaml where PyYAML has it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
