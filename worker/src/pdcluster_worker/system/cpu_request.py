"""CPU request of this process's container, in cores: the cores that its node keeps for it under
load, where a limit says only what it may take.

Kubernetes gives a container 1024 shares for each core that it requests.  cgroup v1
keeps shares; cgroup v2 keeps a weight, which runc before 1.3.2 and crun before 1.23
computed by another formula.  That one gave smaller weights, so a weight is read by
the new one: never more than the request, and less with an older runtime.  There a
container of the class Guaranteed is still known, by its OOM score: its request is
its limit.  Weights and shares that nothing has set are one core.
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

GUARANTEED = "-997"
"""OOM score that the kubelet gives a container of a Guaranteed pod, and a node-critical one."""

_SHARES_OF_A_CORE = 1024


def process_request() -> float:
    """CPU request of this process's container, as the machine says now."""
    return cgroup_request(read(PROC_CGROUP), read(PROC_OOM_SCORE), CGROUP_ROOT)


def cgroup_request(proc_cgroup: str, oom_score: str, root: Path) -> float:
    """Cores that the process of these /proc/self texts is sure of, under the mounted `root`; 0
    where nothing says so.
    """
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
    """The number in the first file that has one; 0 where none has.

    Those of ancestors are the shares of a pod, and of all pods, among others.
    """
    texts = (read(file).strip() for file in files)
    return next((int(text) for text in texts if text.isdigit()), 0)
