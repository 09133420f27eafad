"""The limit on open files, which bounds connections."""

import resource

_OTHER_FILES = 256  # for peers, etcd, the model, pipes

FILES_OF_RELAYED = 3  # of a router per request: client, worker, and its own server's

_ENOUGH = 65536


def fitting(max_connections: int, *, files_each: int = 1) -> int:
    """max_connections, or what the limit on open files allows; at least 1."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return max_connections
    return max(1, min(max_connections, (files - _OTHER_FILES) // files_each))


def allow_more_files() -> None:
    """Raise the limit as far as allowed, or enough: shells set 1024."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _ENOUGH if most == resource.RLIM_INFINITY else min(_ENOUGH, most)
    if files != resource.RLIM_INFINITY and files < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
