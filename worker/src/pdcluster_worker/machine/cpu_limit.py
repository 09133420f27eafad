"""Number of CPU threads the model may use: the least of the cgroup limit and the scheduler's
affinity mask.

torch alone counts the host's cores, which in a container with a smaller limit
means throttling.  Parsing is pure; `available_threads` is the one reader of
/proc and /sys.  Knows cgroup v1 and v2, and limits set on any ancestor.
"""

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

CGROUP_ROOT = Path("/sys/fs/cgroup")
V1_FOLDERS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")


def parse_cpu_max(text: str) -> float | None:
    """Cores of a cgroup v2 `cpu.max` ("200000 100000" is 2.0); None for "max" or anything else."""
    fields = text.split()
    return _cores(fields[0], fields[1]) if len(fields) == 2 else None


def parse_cfs(quota: str, period: str) -> float | None:
    """Cores of cgroup v1's `cpu.cfs_quota_us` and `cpu.cfs_period_us`; None for no limit (-1)."""
    return _cores(quota.strip(), period.strip())


def parse_cgroup_paths(text: str) -> tuple[str | None, str | None]:
    """The process's (v2, v1 cpu controller) paths from /proc/self/cgroup, lines
    `id:controllers:path`.
    """
    v2 = v1 = None
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            v2 = path
        elif "cpu" in controllers.split(","):
            v1 = path
    return v2, v1


def threads_for(num_cores: int, limits: Iterable[float]) -> int:
    """Whole threads under every limit, at least 1; rounded down, because a thread over the limit
    stalls all of a step's others.
    """
    return max(1, int(min([float(num_cores), *limits])))


def available_threads() -> int:
    """Threads for this process, as the machine says now."""
    try:
        num_cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        num_cores = os.cpu_count() or 1
    return threads_for(num_cores, process_limits())


def process_limits() -> list[float]:
    """Every CPU limit of this process, in cores."""
    return cgroup_limits(_read(Path("/proc/self/cgroup")), CGROUP_ROOT)


def cgroup_limits(proc_cgroup: str, root: Path) -> list[float]:
    """Every CPU limit, in cores, that applies to the process of this /proc/self/cgroup text under
    the mounted `root`.
    """
    v2, v1 = parse_cgroup_paths(proc_cgroup)
    v1_folders = [folder for name in V1_FOLDERS for folder in _lineage(root / name, v1)]
    limits = [
        *(parse_cpu_max(_read(folder / "cpu.max")) for folder in _lineage(root, v2)),
        *(
            parse_cfs(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))
            for folder in v1_folders
        ),
    ]
    return [limit for limit in limits if limit is not None]


def _lineage(root: Path, path: str | None) -> list[Path]:
    """The cgroup's folder and its ancestors up to `root`; in a container `path` may not exist
    there, `root` always does.
    """
    if path is None:
        return [root]
    own = PurePosixPath(path.lstrip("/"))
    return [root / part for part in (own, *own.parents)]


def _cores(quota: str, period: str) -> float | None:
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
