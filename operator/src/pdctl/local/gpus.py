"""GPUs of this machine as its driver shows them, and the workers that get them.

Pure but for `read_driver`.  A worker sees its own devices alone, by CUDA_VISIBLE_DEVICES.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from pdcluster_schema.accelerators import NO_ACCELERATOR, accelerators
from pdcluster_schema.faults import Fault, InvalidObjectError
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.text import one_line

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader")
_SECONDS = 30.0  # a driver that is not kept loaded takes some to start
_COLUMNS = 3

Worker = tuple[str, str, int]
"""Role, pool and ordinal."""


@dataclass(frozen=True)
class Gpu:
    """index: as nvidia-smi counts, which is by PCI bus."""

    index: int
    uuid: str
    name: str


@dataclass(frozen=True)
class DriverReport:
    """reason: why there are no GPUs."""

    gpus: tuple[Gpu, ...] = ()
    reason: str = ""


def needs_gpus(cluster: PDCluster) -> bool:
    return any(pool.gpu != NO_ACCELERATOR for pool in cluster.spec.roles.pools())


def read_driver() -> DriverReport:
    try:
        answer = subprocess.run(
            _QUERY, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except FileNotFoundError:
        return DriverReport(reason="no nvidia-smi is on the PATH")
    except (OSError, subprocess.TimeoutExpired) as e:
        return DriverReport(reason=f"nvidia-smi: {e}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible_gpus(answer.stdout + ("" if answer.returncode == 0 else answer.stderr), visible)


def visible_gpus(text: str, visible: str | None) -> DriverReport:
    """GPUs of nvidia-smi's answer, as far as CUDA_VISIBLE_DEVICES lets them be seen.

    >>> visible_gpus("0, GPU-a, NVIDIA H200\\n1, GPU-b, NVIDIA H200", "GPU-b").gpus[0].index
    1
    >>> visible_gpus("No devices were found", None).reason
    'nvidia-smi: No devices were found'
    """
    rows = [[part.strip() for part in line.split(",", _COLUMNS - 1)] for line in text.splitlines()]
    if not rows or not all(len(row) == _COLUMNS and row[0].isdigit() for row in rows):
        return DriverReport(reason=f"nvidia-smi: {one_line(text) or 'no GPU'}")
    gpus = tuple(Gpu(int(index), uuid, name) for index, uuid, name in rows)
    if visible is None:
        return DriverReport(gpus)
    known = {key: gpu for gpu in gpus for key in (str(gpu.index), gpu.uuid)}
    names = [each.strip() for each in visible.split(",") if each.strip()]
    if unknown := [name for name in names if name not in known]:
        why = "which nvidia-smi does not show"
        if unknown[0].startswith("MIG-"):
            why = "a part of a GPU, and workers get whole ones here: name those, by index or UUID"
        return DriverReport(reason=f"CUDA_VISIBLE_DEVICES names {unknown[0]}, {why}")
    shown = tuple(dict.fromkeys(known[name] for name in names))
    return DriverReport(shown, "" if shown else "CUDA_VISIBLE_DEVICES is empty")


def assign_gpus(cluster: PDCluster, report: DriverReport) -> Mapping[Worker, tuple[Gpu, ...]]:
    """GPUs for each worker of a pool with a `gpu`, in order over the pools; no GPU twice.

    Raises InvalidObjectError with a fault for each pool that gets too few.
    """
    left, given, faults = list(report.gpus), dict[Worker, tuple[Gpu, ...]](), list[Fault]()
    for role, spec in cluster.spec.roles.computing().items():
        for place, pool in enumerate(spec.pools):
            if pool.gpu == NO_ACCELERATOR:
                continue
            each = cluster.spec.gpus_per_replica(role, pool)
            fitting = [gpu for gpu in left if is_of_type(gpu, pool.gpu)]
            taken = fitting[: each * pool.replicas]
            if len(taken) < each * pool.replicas:
                reason = (
                    f"pool {pool.name} wants {each * pool.replicas} {pool.gpu} (replicas: "
                    f"{pool.replicas}, {each} each), and {_shown(report, len(fitting))}"
                )
                fix = "lower replicas or gpusPerReplica, write gpu: cpu, or apply it to Kubernetes"
                faults.append(Fault(f"spec.roles.{role}.pools[{place}].gpu", reason, fix))
                continue
            left = [gpu for gpu in left if gpu not in taken]
            for ordinal in range(pool.replicas):
                part = taken[ordinal * each : (ordinal + 1) * each]
                given[role, pool.name, ordinal] = tuple(part)
    if faults:
        raise InvalidObjectError(faults)
    return given


def is_of_type(gpu: Gpu, kind: str) -> bool:
    """True if a driver's name has each word of the type, as NVIDIA A100-SXM4-80GB has A100-80GB.

    A type of the spec's own may be any GPU: how a driver names it is not known.
    """
    return kind not in accelerators() or _words(kind) <= _words(gpu.name)


def _words(name: str) -> set[str]:
    return set(re.split(r"[\s-]+", name))


def _shown(report: DriverReport, number: int) -> str:
    if not report.gpus:
        return f"the driver shows 0: {report.reason}"
    names = ", ".join(gpu.name for gpu in report.gpus)
    return f"the driver shows {number} that no other pool has (of {names})"


def gpu_variables(devices: tuple[Gpu, ...]) -> dict[str, str]:
    """Environment of a worker; one without devices sees none: -1, since vLLM runs Triton's kernels,
    which need a GPU, where the value is empty.
    """
    indices = ",".join(str(gpu.index) for gpu in devices) or "-1"
    return {"CUDA_VISIBLE_DEVICES": indices, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
