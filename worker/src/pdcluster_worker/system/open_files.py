"""The limit on open files of this process, as a bound of its connections."""

import resource

_OTHER_FILES = 256
"""Files and sockets that a process of the worker opens for other ends: peers, etcd, the model,
pipes.
"""

FILES_OF_RELAYED = 3
"""Files of a router for each request: the client's connection, the one to the worker, and one more,
since its own server may have as many requests as it relays.
"""

_ENOUGH = 65536


def fitting(max_connections: int, *, files_each: int = 1) -> int:
    """As many of them as this process may open files for; at least one."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return max_connections
    return max(1, min(max_connections, (files - _OTHER_FILES) // files_each))


def allow_more_files() -> None:
    """Raise the limit as far as this process may, or enough: shells set 1024 for old programs."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _ENOUGH if most == resource.RLIM_INFINITY else min(_ENOUGH, most)
    if files != resource.RLIM_INFINITY and files < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
