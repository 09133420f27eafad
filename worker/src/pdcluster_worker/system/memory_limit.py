"""Memory that a process may use, by the machine and its cgroups: beyond it the kernel ends the
process, without a word.
"""

import re
from pathlib import Path

from pdcluster_worker.system.cgroups import (
    CGROUP_ROOT,
    PROC_CGROUP,
    lineage,
    parse_cgroup_paths,
    read,
)

_TOTAL = re.compile(r"^MemTotal:\s+(\d+) kB", re.MULTILINE)


def memory_limit() -> int | None:
    """Bytes that this process may use; None where nothing says so, as outside Linux."""
    total = _TOTAL.search(read(Path("/proc/meminfo")))
    limits = cgroup_memory_limits(read(PROC_CGROUP), CGROUP_ROOT)
    return min([*limits, *([int(total[1]) << 10] if total else [])], default=None)


def cgroup_memory_limits(proc_cgroup: str, root: Path) -> list[int]:
    """Every memory limit, in bytes, of the process of this /proc/self/cgroup text under the mounted
    `root`.
    """
    v2, v1 = parse_cgroup_paths(proc_cgroup, "memory")
    files = [
        *(folder / "memory.max" for folder in lineage(root, v2)),
        *(folder / "memory.limit_in_bytes" for folder in lineage(root / "memory", v1)),
    ]
    values = [read(file).strip() for file in files]
    return [int(text) for text in values if text.isdigit()]
