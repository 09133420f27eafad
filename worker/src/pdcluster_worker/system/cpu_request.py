"""CPU request of this container in cores, from its cgroup.

cgroup v2 has a weight, whose formula changed with runc 1.3.2 and crun 1.23: the new one never
exceeds the request.  An older Guaranteed container is recognised by its OOM score.
"""

import math
from pathlib import Path

from pdcluster_worker.system.cgroups import (
    CGROUP_ROOT,
    PROC_CGROUP,
    lineage,
    parse_cgroup_paths,
    read,
)
from pdcluster_worker.system.cpu_limit import V1_FOLDERS, cgroup_limits

PROC_OOM_SCORE = Path("/proc/self/oom_score_adj")

GUARANTEED = "-997"  # of a container of a Guaranteed or node-critical pod

_SHARES_OF_A_CORE = 1024


def process_request() -> float:
    return cgroup_request(read(PROC_CGROUP), read(PROC_OOM_SCORE), CGROUP_ROOT)


def cgroup_request(proc_cgroup: str, oom_score: str, root: Path) -> float:
    """Guaranteed cores of the process with these /proc/self texts; 0 = unknown."""
    limits = cgroup_limits(proc_cgroup, root)
    if limits and oom_score.strip() == GUARANTEED:
        return min(limits)
    v2, v1 = parse_cgroup_paths(proc_cgroup, "cpu")
    weight = _nearest([folder / "cpu.weight" for folder in lineage(root, v2)])
    if weight:
        return cores_of_weight(weight)
    shares = _nearest(
        [folder / "cpu.shares" for name in V1_FOLDERS for folder in lineage(root / name, v1)]
    )
    return shares / _SHARES_OF_A_CORE


def cores_of_weight(weight: int) -> float:
    """Cores of a cgroup v2 weight: 1 of 100, 2 of 174.

    weight: ceil(10 ^ ((L^2 + 125 L) / 612 - 7 / 34)), where L = log2(shares)
    """
    exponent = 612 * (math.log10(weight) + 7 / 34)
    return 2 ** ((math.sqrt(125**2 + 4 * exponent) - 125) / 2) / _SHARES_OF_A_CORE


def _nearest(files: list[Path]) -> int:
    """The number in the first file that has one, or 0; ancestors have the shares of pods."""
    texts = (read(file).strip() for file in files)
    return next((int(text) for text in texts if text.isdigit()), 0)
