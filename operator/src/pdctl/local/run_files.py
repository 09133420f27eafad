"""Writes the files that worker processes read."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pdcluster_api.manifests.vllm import IN_CONTAINER
from pdcluster_api.manifests.worker_config import WorkerFileSettings, engine_file, policy_file
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.vllm_engine import VLLM
from pdctl.local.certificates import Certificates
from pdctl.local.plan import ProcessSpec
from pdctl.local.processes import Launch
from pdctl.local.run_directory import RunDirectory, write_yaml
from pdctl.local.vllm_engine import vllm_settings

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RunSettings:
    """command: the worker program, without its files."""

    run: RunDirectory
    model_path: Path
    etcd_endpoints: tuple[str, ...]
    certificates: Certificates
    command: tuple[str, ...]


def write_policy(cluster: PDCluster, site: RunSettings) -> None:
    write_yaml(site.run.policy, policy_file(cluster))


def write_process(cluster: PDCluster, process: ProcessSpec, site: RunSettings) -> Launch:
    """Write the engine file of one process and return how to start it."""
    path = site.run.config / f"{process.name}.yaml"
    write_yaml(
        path,
        engine_file(
            cluster, process.role, process.pool, process.engine, _worker_site(process, site)
        ),
    )
    return Launch(
        name=process.name,
        command=(*site.command, "--engine-config", str(path), "--policy", str(site.run.policy)),
        log=site.run.logs / f"{process.name}.log",
        environment={
            "POD_NAME": process.name,
            "POD_NAMESPACE": cluster.metadata.namespace,
            "POD_IP": LOOPBACK,
            "PYTHONUNBUFFERED": "1",
            "PDCLUSTER_OWN_CORES": str(process.engine.threads if process.owns_cores else 0),
            **_shared_cores(process, site),
        },
    )


def _shared_cores(process: ProcessSpec, site: RunSettings) -> dict[str, str]:
    """Environment of an engine that shares its cores (docs/design/lent-cores.md)."""
    if process.shared_cores is None:
        return {}
    place = {"path": str(site.run.path / "cores"), **asdict(process.shared_cores)}
    return {"PDCLUSTER_SHARED_CORES": json.dumps(place)}


def _worker_site(process: ProcessSpec, site: RunSettings) -> WorkerFileSettings:
    return WorkerFileSettings(
        model_path=str(site.model_path),
        etcd_endpoints=site.etcd_endpoints,
        ca=str(site.certificates.ca),
        certificate=str(site.certificates.certificate),
        key=str(site.certificates.key),
        host=LOOPBACK,
        http_port=process.http_port,
        grpc_port=0,
        kv_port=0,
        vllm=vllm_settings() if process.engine.type == VLLM else IN_CONTAINER,
    )
