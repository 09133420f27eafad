"""Resources of this machine: CPU cores and free ports."""

import errno
import os
import socket
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = _CGROUP) -> int:
    """By affinity and cgroup quota, in whole cores, at least one."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_cores(cgroup)
    return max(1, min(cores, int(quota))) if quota is not None else cores


def port_is_free(port: int) -> bool:
    """port 0 = any.  Raises OSError for a port that this user may not use."""
    with socket.socket() as probe:
        # as servers do: a closed connection's remains are no obstacle
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return False
            raise
        return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _cgroup_cores(cgroup: Path) -> float | None:
    """CPU quota of cgroup version 2 or 1; None = no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
