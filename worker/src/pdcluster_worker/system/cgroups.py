"""CPU and memory limits and the CPU request of this process, from its cgroups, v1 and v2.

cgroup v2 has a weight for a request, whose formula changed with runc 1.3.2 and crun 1.23: the new
one never exceeds the request.  An older Guaranteed container is recognised by its OOM score.
"""

import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_CGROUP = Path("/proc/self/cgroup")
PROC_OOM_SCORE = Path("/proc/self/oom_score_adj")

GUARANTEED = "-997"  # OOM score of a container of a Guaranteed or node-critical pod

_V1_CPU = ("cpu", "cpu,cpuacct", "cpuacct,cpu")
_SHARES_OF_A_CORE = 1024
_TOTAL = re.compile(r"^MemTotal:\s+(\d+) kB", re.MULTILINE)


def available_threads() -> int:
    """CPU threads for the model: the lower one of cgroup limit and affinity mask."""
    try:
        num_cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        num_cores = os.cpu_count() or 1
    return threads_for(num_cores, process_limits())


def threads_for(num_cores: int, limits: Iterable[float]) -> int:
    """Rounded down, at least 1: a thread over the limit stalls the others of a step."""
    return max(1, int(min([float(num_cores), *limits])))


def process_limits() -> list[float]:
    return cgroup_limits(_read(PROC_CGROUP), CGROUP_ROOT)


def cgroup_limits(proc_cgroup: str, root: Path) -> list[float]:
    """CPU limits, in cores, of the process with this /proc/self/cgroup text."""
    v2, v1 = _folders(proc_cgroup, "cpu", root, _V1_CPU)
    limits = [
        *(parse_cpu_max(_read(folder / "cpu.max")) for folder in v2),
        *(
            parse_cpu_max(
                f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
            )
            for folder in v1
        ),
    ]
    return [limit for limit in limits if limit is not None]


def parse_cpu_max(text: str) -> float | None:
    """Cores of a quota and a period ("200000 100000" is 2.0); None = no limit."""
    try:
        quota, period = text.split()
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None


def process_request() -> float:
    return cgroup_request(_read(PROC_CGROUP), _read(PROC_OOM_SCORE), CGROUP_ROOT)


def cgroup_request(proc_cgroup: str, oom_score: str, root: Path) -> float:
    """Guaranteed cores of the process with these /proc/self texts; 0 = unknown."""
    limits = cgroup_limits(proc_cgroup, root)
    if limits and oom_score.strip() == GUARANTEED:
        return min(limits)
    v2, v1 = _folders(proc_cgroup, "cpu", root, _V1_CPU)
    weights = _numbers(folder / "cpu.weight" for folder in v2)
    if weights and weights[0]:
        return cores_of_weight(weights[0])
    # the nearest: ancestors have the shares of pods
    return next(iter(_numbers(folder / "cpu.shares" for folder in v1)), 0) / _SHARES_OF_A_CORE


def cores_of_weight(weight: int) -> float:
    """Cores of a cgroup v2 weight: 1 of 100, 2 of 174.

    weight: ceil(10 ^ ((L^2 + 125 L) / 612 - 7 / 34)), where L = log2(shares)
    """
    exponent = 612 * (math.log10(weight) + 7 / 34)
    return 2 ** ((math.sqrt(125**2 + 4 * exponent) - 125) / 2) / _SHARES_OF_A_CORE


def memory_limit() -> int | None:
    """Bytes that this process may use before the kernel kills it; None = unknown, not on Linux."""
    total = _TOTAL.search(_read(Path("/proc/meminfo")))
    limits = cgroup_memory_limits(_read(PROC_CGROUP), CGROUP_ROOT)
    return min([*limits, *([int(total[1]) << 10] if total else [])], default=None)


def cgroup_memory_limits(proc_cgroup: str, root: Path) -> list[int]:
    """Memory limits, in bytes, of the process with this /proc/self/cgroup text."""
    v2, v1 = _folders(proc_cgroup, "memory", root, ("memory",))
    files = [folder / "memory.max" for folder in v2]
    return _numbers([*files, *(folder / "memory.limit_in_bytes" for folder in v1)])


def _folders(
    proc_cgroup: str, controller: str, root: Path, v1_names: Sequence[str]
) -> tuple[list[Path], list[Path]]:
    """(v2, v1) folders by /proc/self/cgroup, lines `id:controllers:path`: own first, then up."""
    v2 = v1 = ""
    for line in proc_cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            v2 = path
        elif controller in controllers.split(","):
            v1 = path
    return _lineage(root, v2), [folder for name in v1_names for folder in _lineage(root / name, v1)]


def _lineage(root: Path, path: str) -> list[Path]:
    """A cgroup's folder and its ancestors up to `root`; in a container only `root` may exist."""
    own = PurePosixPath(path.lstrip("/"))
    return [root / part for part in (own, *own.parents)]


def _numbers(files: Iterable[Path]) -> list[int]:
    """The numbers of those files that have one."""
    texts = [_read(file).strip() for file in files]
    return [int(text) for text in texts if text.isdigit()]


def _read(path: Path) -> str:
    """Empty where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
