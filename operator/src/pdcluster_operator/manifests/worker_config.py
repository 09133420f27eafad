"""The two files that a worker reads: the engine file (fixed for a revision) and the policy file (hot-reloaded).

Rendered in full, defaults included, so that a worker of another version reads
the same values.  Field names are a contract with the worker (`tests/contract`).
"""

from dataclasses import asdict, dataclass
from typing import Any

from pdcluster_operator.api.pdcluster import PDCluster
from pdcluster_operator.api.revision import revision_of
from pdcluster_operator.api.section import Section
from pdcluster_operator.api.sections import EngineSpec, PoolSpec


@dataclass(frozen=True)
class EtcdTls:
    """PEM files for an etcd that speaks TLS; certificate and key only where it asks clients for one."""

    ca: str
    certificate: str | None = None
    key: str | None = None


@dataclass(frozen=True)
class WorkerSite:
    """What depends on where a worker runs and not on the spec: paths as the worker sees them, where it listens (port 0 = any).

    api_keys: folder of files that each hold one key which clients may present; None = no key is asked for
    """

    model_path: str
    etcd_endpoints: tuple[str, ...]
    ca: str
    certificate: str
    key: str
    host: str = "0.0.0.0"
    http_port: int = 8000
    grpc_port: int = 9000
    kv_port: int = 9100
    etcd_tls: EtcdTls | None = None
    api_keys: str | None = None


def engine_file(cluster: PDCluster, role: str, pool: PoolSpec, engine: EngineSpec, site: WorkerSite) -> dict[str, Any]:
    """The engine file of the workers of one role and pool."""
    return {
        "cluster": cluster.metadata.name,
        "revision": revision_of(cluster.spec),
        "role": role,
        "pool": pool.name,
        "gpu": pool.gpu,
        "tensorParallel": pool.gpus_per_replica,
        "model": {"name": cluster.spec.model.name, "path": site.model_path, "dtype": cluster.spec.model.dtype},
        "engine": _fields(engine),
        "discovery": {"endpoints": list(site.etcd_endpoints), "tls": asdict(site.etcd_tls) if site.etcd_tls else None},
        "tls": {"ca": site.ca, "certificate": site.certificate, "key": site.key},
        "listen": {"host": site.host, "http": site.http_port, "grpc": site.grpc_port, "kv": site.kv_port, "apiKeys": site.api_keys},
    }


def policy_file(cluster: PDCluster) -> dict[str, Any]:
    """The policy file of every worker of a cluster."""
    return {**_fields(cluster.spec.routing), **_fields(cluster.spec.qos)}


def _fields(section: Section) -> dict[str, Any]:
    fields: dict[str, Any] = section.model_dump(mode="json", by_alias=True)
    return fields
