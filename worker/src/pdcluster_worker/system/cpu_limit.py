"""CPU threads for the model: the lower one of cgroup limit (v1, v2) and affinity mask."""

import os
from collections.abc import Iterable
from pathlib import Path

from pdcluster_worker.system.cgroups import (
    CGROUP_ROOT,
    PROC_CGROUP,
    lineage,
    parse_cgroup_paths,
    read,
)

V1_FOLDERS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")


def parse_cpu_max(text: str) -> float | None:
    """Cores of cgroup v2's `cpu.max` ("200000 100000" is 2.0); None = no limit."""
    fields = text.split()
    return _cores(fields[0], fields[1]) if len(fields) == 2 else None


def parse_cfs(quota: str, period: str) -> float | None:
    """Cores of cgroup v1's `cpu.cfs_quota_us` and `cpu.cfs_period_us`; None = no limit."""
    return _cores(quota.strip(), period.strip())


def threads_for(num_cores: int, limits: Iterable[float]) -> int:
    """Rounded down, at least 1: a thread over the limit stalls the others of a step."""
    return max(1, int(min([float(num_cores), *limits])))


def available_threads() -> int:
    try:
        num_cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        num_cores = os.cpu_count() or 1
    return threads_for(num_cores, process_limits())


def process_limits() -> list[float]:
    return cgroup_limits(read(PROC_CGROUP), CGROUP_ROOT)


def cgroup_limits(proc_cgroup: str, root: Path) -> list[float]:
    """CPU limits, in cores, of the process with this /proc/self/cgroup text."""
    v2, v1 = parse_cgroup_paths(proc_cgroup, "cpu")
    v1_folders = [folder for name in V1_FOLDERS for folder in lineage(root / name, v1)]
    limits = [
        *(parse_cpu_max(read(folder / "cpu.max")) for folder in lineage(root, v2)),
        *(
            parse_cfs(read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us"))
            for folder in v1_folders
        ),
    ]
    return [limit for limit in limits if limit is not None]


def _cores(quota: str, period: str) -> float | None:
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None
