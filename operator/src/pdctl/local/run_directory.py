"""The files of one run, under the user's state folder.

    STATE_DIR/NAME/lock            held by the running pdctl of that name
    STATE_DIR/NAME/cluster.yaml    of a `pdctl up MODEL`
    STATE_DIR/.gpus/UUID           held by the one whose workers have that GPU
    STATE_DIR/NAME/run-PID-STARTED-XXXX/
                                   state.json  transfers.json  remarks.json
                                   config/  certificates/  etcd/  logs/  prometheus/

A run's folder stays for its logs until the next run of the same name removes it.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from pdcluster_api.certificates.authority import issue, make_authority
from pdcluster_api.errors import StartError
from pdcluster_api.manifests.vllm import IN_CONTAINER
from pdcluster_api.manifests.worker_config import (
    WorkerFileSettings,
    answers_clients,
    engine_file,
    loads_adapters,
)
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.ports import GRACE_SECONDS, PICKER_PORT, WORKER_NAME
from pdcluster_schema.sections import PICKER
from pdctl.local.gpus import Gpu, gpu_variables
from pdctl.local.machine import vllm_settings
from pdctl.local.plan import ProcessSpec
from pdctl.local.processes import DRAIN_SECONDS, Launch


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @classmethod
    def create(cls, state_dir: Path, name: str) -> "RunDirectory":
        """A fresh folder with mode 0700; removes those of ended runs.

        Raises StartError when it cannot be written.
        """
        parent = state_dir / name
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for old in runs(state_dir, name):
                if not old.is_alive:
                    shutil.rmtree(old.path, ignore_errors=True)
            prefix = f"run-{os.getpid()}-{_started(os.getpid())}-"
            run = cls(Path(tempfile.mkdtemp(prefix=prefix, dir=parent)))
            for folder in (run.config, run.certificates, run.logs, run.prometheus):
                folder.mkdir()
        except OSError as e:
            raise state_unwritable(parent, e) from e
        return run

    @staticmethod
    @contextlib.contextmanager
    def name_taken(state_dir: Path, name: str, port: int) -> Iterator[None]:
        """Hold the name of a run.  Raises StartError when another run holds it."""
        with contextlib.ExitStack() as held:
            if other := _lock(state_dir / name / "lock", _holder(port), held):
                raise StartError(
                    f"{name} runs here already: {other}; end that one first, or give this one "
                    "another metadata.name, a MODEL by --name",
                    exit_code=2,
                )
            yield

    @staticmethod
    @contextlib.contextmanager
    def gpus_taken(state_dir: Path, name: str, port: int, devices: Iterable[Gpu]) -> Iterator[None]:
        """Hold GPUs for a run.  Raises StartError when another run holds one."""
        with contextlib.ExitStack() as held:
            for device in devices:
                holder = f"{name}, {_holder(port)}"
                if other := _lock(state_dir / ".gpus" / device.uuid, holder, held):
                    raise StartError(
                        f"GPU {device.index} is used by {other}; end that one first, or leave "
                        "the GPU out with CUDA_VISIBLE_DEVICES",
                        exit_code=2,
                    )
            yield

    @property
    def config(self) -> Path:
        return self.path / "config"

    @property
    def certificates(self) -> Path:
        return self.path / "certificates"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def prometheus(self) -> Path:
        return self.path / "prometheus"

    @property
    def etcd_data(self) -> Path:
        return self.path / "etcd"

    @property
    def policy(self) -> Path:
        return self.config / "policy.yaml"

    @property
    def name(self) -> str:
        """Name of the cluster."""
        return self.path.parent.name

    @property
    def pid(self) -> int:
        """Process id of the pdctl that made the folder."""
        return int(self.path.name.split("-")[1])

    @property
    def is_alive(self) -> bool:
        """A later process of the same pid was started at another time."""
        return _started(self.pid) == self.path.name.split("-")[2]

    def write_state(self, state: dict[str, Any]) -> None:
        replace_file(self.path / "state.json", json.dumps(state, indent=2) + "\n")

    def read_state(self) -> dict[str, Any] | None:
        """None until it is written."""
        return _read_json(self.path / "state.json")

    def write_remarks(self, remarks: list[str]) -> None:
        replace_file(self.path / "remarks.json", json.dumps({"remarks": remarks}) + "\n")

    def read_remarks(self) -> dict[str, Any]:
        return _read_json(self.path / "remarks.json") or {}

    def read_all(self) -> dict[str, Any]:
        """State, transfers and remarks, as `pdctl status` shows them."""
        return (self.read_state() or {}) | self.read_transfers() | self.read_remarks()

    def write_transfers(self, content: dict[str, Any]) -> None:
        replace_file(self.path / "transfers.json", json.dumps(content, indent=2) + "\n")

    def read_transfers(self) -> dict[str, Any]:
        return _read_json(self.path / "transfers.json") or {}


def _started(pid: int) -> str:
    """Start of a process, in the kernel's ticks since boot; empty where it has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    state, *fields = status.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]


def default_state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "pdcluster"


def runs(state_dir: Path, name: str | None = None) -> list[RunDirectory]:
    """Runs of a name, or all; the newest last.  One that is removed meanwhile is left out."""
    dated = []
    for folder in _entries(state_dir):
        for path in _entries(folder) if name in (None, folder.name) else ():
            with contextlib.suppress(OSError):
                if path.match("run-*-*"):
                    dated.append((path.stat().st_mtime_ns, path))
    return [RunDirectory(path) for _, path in sorted(dated)]


def _entries(folder: Path) -> list[Path]:
    """Empty where it is no folder, or none any more."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def remove_api_keys(state_dir: Path, name: str) -> None:
    """Remove those of the runs of a name that is held: they have all ended."""
    for run in runs(state_dir, name):
        shutil.rmtree(run.path / API_KEYS, ignore_errors=True)


def _holder(port: int) -> str:
    return f"process {os.getpid()}, port {port}"


def _lock(path: Path, holder: str, held: contextlib.ExitStack) -> str:
    """Take a lock until `held` ends; returns the run that has it, or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = held.enter_context(path.open("ab", buffering=0))
    except OSError as e:
        raise state_unwritable(path.parent, e) from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"{holder}\n".encode())
    except BlockingIOError:
        return path.read_text().strip() or "another run"
    except OSError as e:  # a file system without locks, or space
        raise state_unwritable(path.parent, e) from e
    return ""


def state_unwritable(path: Path | str, error: OSError) -> StartError:
    fix = "choose another folder with --state-dir"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = f"free some space, or {fix}"
    return StartError(f"{path}: cannot be written: {error.strerror}; {fix}", exit_code=1)


def write_yaml(path: Path, content: dict[str, Any]) -> None:
    replace_file(path, yaml.safe_dump(content, sort_keys=False))


def replace_file(path: Path, text: str) -> None:
    """Atomic, also with two writers.  Raises OSError that names the path."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with _naming(path):
            temporary.write_text(text)
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of writes, which have no path, get this one."""
    try:
        yield
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return content


LOOPBACK = "127.0.0.1"
API_KEYS = "api-keys"


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


def read_api_key(run: RunDirectory) -> str | None:
    """None where the run asks for none."""
    try:
        return (run.path / API_KEYS / "key").read_text()
    except FileNotFoundError:
        return None


def write_api_key(folder: Path, key: str) -> Path:
    """Returns the folder, as workers read it."""
    folder.mkdir(mode=0o700)
    _write(folder / "key", key.encode())
    return folder


def _write(path: Path, content: bytes) -> None:
    """Created with mode 0600: no reader in between."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with _naming(path), os.fdopen(descriptor, "wb") as file:
        file.write(content)


@dataclass(frozen=True)
class RunSettings:
    """command: the worker program, without its files."""

    run: RunDirectory
    model_path: Path
    etcd_endpoints: tuple[str, ...]
    certificates: Certificates
    command: tuple[str, ...]
    host: str = LOOPBACK
    api_keys: Path | None = None


def write_process(cluster: PDCluster, process: ProcessSpec, settings: RunSettings) -> Launch:
    """Write the engine file of one process and return how to start it."""
    path = settings.run.config / f"{process.name}.yaml"
    write_yaml(
        path,
        engine_file(
            cluster,
            process.role,
            process.pool,
            process.engine,
            _worker_settings(cluster, process, settings),
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
            GRACE_SECONDS: str(int(DRAIN_SECONDS)),
            "PDCLUSTER_OWN_CORES": str(process.engine.threads if process.owns_cores else 0),
            **gpu_variables(process.devices),
            **_shared_cores(process, settings),
        },
    )


def _shared_cores(process: ProcessSpec, settings: RunSettings) -> dict[str, str]:
    """Environment of an engine that shares its cores (docs/design/lent-cores.md)."""
    if process.shared_cores is None:
        return {}
    place = {"path": str(settings.run.path / "cores"), **asdict(process.shared_cores)}
    return {"PDCLUSTER_SHARED_CORES": json.dumps(place)}


def _worker_settings(
    cluster: PDCluster, process: ProcessSpec, settings: RunSettings
) -> WorkerFileSettings:
    has_clients = answers_clients(cluster, process.role) or loads_adapters(cluster, process.role)
    has_keys = settings.api_keys is not None and has_clients
    return WorkerFileSettings(
        model_path=str(settings.model_path),
        etcd_endpoints=settings.etcd_endpoints,
        ca=str(settings.certificates.ca),
        certificate=str(settings.certificates.certificate),
        key=str(settings.certificates.key),
        host=LOOPBACK,
        http_host=settings.host if process.http_port else None,
        http_port=process.http_port,
        grpc_port=0,
        kv_port=0,
        picker_port=process.picker_port if process.role == PICKER else PICKER_PORT,
        api_keys=str(settings.api_keys) if has_keys else None,
        vllm=vllm_settings(process.engine.data_parallel_size)
        if process.engine.is_stock
        else IN_CONTAINER,
    )
