"""Memory that this process may use before the kernel kills it."""

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
    """Bytes, by machine and cgroups; None = unknown, as outside Linux."""
    total = _TOTAL.search(read(Path("/proc/meminfo")))
    limits = cgroup_memory_limits(read(PROC_CGROUP), CGROUP_ROOT)
    return min([*limits, *([int(total[1]) << 10] if total else [])], default=None)


def cgroup_memory_limits(proc_cgroup: str, root: Path) -> list[int]:
    """Memory limits, in bytes, of the process with this /proc/self/cgroup text."""
    v2, v1 = parse_cgroup_paths(proc_cgroup, "memory")
    files = [
        *(folder / "memory.max" for folder in lineage(root, v2)),
        *(folder / "memory.limit_in_bytes" for folder in lineage(root / "memory", v1)),
    ]
    values = [read(file).strip() for file in files]
    return [int(text) for text in values if text.isdigit()]
