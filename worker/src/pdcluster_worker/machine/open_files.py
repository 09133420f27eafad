"""The limit on open files of this process, as a bound of its connections."""

import resource

_OTHER_FILES = 256
"""Files and sockets that a process of the worker opens for other ends: peers, etcd, the model,
pipes.
"""


def fitting(max_connections: int) -> int:
    """As many of them as this process may open files for; at least one."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return max_connections
    return max(1, min(max_connections, files - _OTHER_FILES))
