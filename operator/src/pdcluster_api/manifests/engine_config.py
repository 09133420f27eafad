"""The engine file of a workload as its pods see it: paths of mounted Secrets, etcd's address,
the contract's ports.
"""

import json
import re
from functools import lru_cache
from typing import Any

import yaml

from pdcluster_api.manifests.model_source import on_volume
from pdcluster_api.manifests.objects import ETCD_CLIENT_PORT, Manifest, Owner, new_object
from pdcluster_api.manifests.vllm import vllm_logging
from pdcluster_api.manifests.worker_config import (
    EtcdTls,
    WorkerFileSettings,
    engine_file,
    policy_file,
)
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.labels import cluster_labels
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.ports import GRPC_PORT, HTTP_PORT, KV_PORT
from pdcluster_schema.sections import ROUTER, PoolSpec
from pdcluster_schema.vllm_engine import VLLM

ENGINE_FOLDER = "/etc/pdcluster/engine"
POLICY_FOLDER = "/etc/pdcluster/policy"
TLS_FOLDER = "/etc/pdcluster/tls"
ETCD_TLS_FOLDER = "/etc/pdcluster/etcd-tls"
API_KEYS_FOLDER = "/etc/pdcluster/api-keys"
ENGINE_FILE, POLICY_FILE = "engine.yaml", "policy.yaml"
LOGGING_FILE = "vllm-logging.json"


def etcd_endpoints(cluster: PDCluster) -> tuple[str, ...]:
    """host:port of the etcd that the workers use: the given ones, or the managed one's Service."""
    given = cluster.spec.discovery.etcd.endpoints
    return given or (
        f"{cluster.metadata.name}-etcd.{cluster.metadata.namespace}.svc:{ETCD_CLIENT_PORT}",
    )


def requires_keys(cluster: PDCluster, role: str) -> bool:
    """True if workers of a role check API keys: those that can answer a client."""
    return cluster.spec.service.api_key_secret is not None and role in (
        ROUTER,
        cluster.spec.decode_role,
    )


def engine_config(
    cluster: PDCluster, role: str, pool: PoolSpec, model_path: str, *, etcd_client_certificate: bool
) -> Manifest:
    site = WorkerFileSettings(
        model_path=model_path,
        etcd_endpoints=etcd_endpoints(cluster),
        ca=f"{TLS_FOLDER}/ca.crt",
        certificate=f"{TLS_FOLDER}/tls.crt",
        key=f"{TLS_FOLDER}/tls.key",
        http_port=HTTP_PORT,
        grpc_port=GRPC_PORT,
        kv_port=KV_PORT,
        etcd_tls=_etcd_tls(cluster, etcd_client_certificate),
        api_keys=API_KEYS_FOLDER if requires_keys(cluster, role) else None,
    )
    engine = _engine(cluster, role)
    files = {ENGINE_FILE: yaml_text(engine_file(cluster, role, pool, engine, site))}
    return {**files, LOGGING_FILE: vllm_logging(engine)} if engine.type == VLLM else files


def _engine(cluster: PDCluster, role: str) -> EngineSpec:
    """The role's engine, a draft model on the claimed volume by its path in the pod."""
    engine = cluster.spec.engine_of(role)
    own = engine.speculation
    if own is None or own.draft_model is None or cluster.spec.model.pvc is None:
        return engine
    return engine.model_copy(
        update={"speculation": own.model_copy(update={"draft_model": on_volume(own.draft_model)})}
    )


def _etcd_tls(cluster: PDCluster, has_certificate: bool) -> EtcdTls | None:
    if cluster.spec.discovery.etcd.tls_secret is None:
        return None
    if not has_certificate:
        return EtcdTls(ca=f"{ETCD_TLS_FOLDER}/ca.crt")
    return EtcdTls(
        ca=f"{ETCD_TLS_FOLDER}/ca.crt",
        certificate=f"{ETCD_TLS_FOLDER}/tls.crt",
        key=f"{ETCD_TLS_FOLDER}/tls.key",
    )


def policy_config(cluster: PDCluster, owner: Owner) -> Manifest:
    data = {POLICY_FILE: yaml_text(policy_file(cluster))}
    return new_object(
        "v1/ConfigMap",
        f"{owner.name}-policy",
        owner,
        cluster_labels(owner.name, "ingress"),
        data=data,
    )


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
