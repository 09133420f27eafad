"""Writes the files that worker processes read; the authority's key is never written to disk."""

import datetime
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pdcluster_api.certificates.authority import issue, make_authority
from pdcluster_api.manifests.vllm import IN_CONTAINER
from pdcluster_api.manifests.worker_config import WorkerFileSettings, engine_file
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.ports import WORKER_NAME
from pdcluster_schema.vllm_engine import VLLM
from pdctl.local.plan import ProcessSpec
from pdctl.local.processes import Launch
from pdctl.local.run_directory import RunDirectory, write_yaml
from pdctl.local.vllm_engine import vllm_settings

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Certificates:
    ca: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    now = datetime.datetime.now(datetime.UTC)
    authority = make_authority(now)
    worker = issue(authority, [WORKER_NAME, "127.0.0.1"], now)
    files = Certificates(folder / "ca.pem", folder / "worker.pem", folder / "worker.key")
    _write(files.ca, authority.certificate)
    _write(files.certificate, worker.certificate)
    _write(files.key, worker.key)
    return files


def _write(path: Path, content: bytes) -> None:
    """Created with mode 0600: no reader in between."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


@dataclass(frozen=True)
class RunSettings:
    """command: the worker program, without its files."""

    run: RunDirectory
    model_path: Path
    etcd_endpoints: tuple[str, ...]
    certificates: Certificates
    command: tuple[str, ...]


def write_process(cluster: PDCluster, process: ProcessSpec, settings: RunSettings) -> Launch:
    """Write the engine file of one process and return how to start it."""
    path = settings.run.config / f"{process.name}.yaml"
    write_yaml(
        path,
        engine_file(
            cluster, process.role, process.pool, process.engine, _worker_settings(process, settings)
        ),
    )
    return Launch(
        name=process.name,
        command=(
            *settings.command,
            "--engine-config",
            str(path),
            "--policy",
            str(settings.run.policy),
        ),
        log=settings.run.logs / f"{process.name}.log",
        environment={
            "POD_NAME": process.name,
            "POD_NAMESPACE": cluster.metadata.namespace,
            "POD_IP": LOOPBACK,
            "PYTHONUNBUFFERED": "1",
            "PDCLUSTER_OWN_CORES": str(process.engine.threads if process.owns_cores else 0),
            **_shared_cores(process, settings),
        },
    )


def _shared_cores(process: ProcessSpec, settings: RunSettings) -> dict[str, str]:
    """Environment of an engine that shares its cores (docs/design/lent-cores.md)."""
    if process.shared_cores is None:
        return {}
    place = {"path": str(settings.run.path / "cores"), **asdict(process.shared_cores)}
    return {"PDCLUSTER_SHARED_CORES": json.dumps(place)}


def _worker_settings(process: ProcessSpec, settings: RunSettings) -> WorkerFileSettings:
    return WorkerFileSettings(
        model_path=str(settings.model_path),
        etcd_endpoints=settings.etcd_endpoints,
        ca=str(settings.certificates.ca),
        certificate=str(settings.certificates.certificate),
        key=str(settings.certificates.key),
        host=LOOPBACK,
        http_port=process.http_port,
        grpc_port=0,
        kv_port=0,
        vllm=vllm_settings() if process.engine.type == VLLM else IN_CONTAINER,
    )
