"""Settings of a process: its end with its parent, open files, malloc, logs."""

import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
from types import FrameType

from pdcluster_schema.log_lines import FORMATTERS, LOG_FORMAT
from pdcluster_worker.errors import WRONG_SETTING

TERMINATED = 128 + signal.SIGTERM
FILES_OF_RELAYED = 3  # of a router per request: client, worker, and its own server's

_PR_SET_PDEATHSIG = 1
_OTHER_FILES = 256  # for peers, etcd, the model, pipes
_ENOUGH_FILES = 65536
_TRIM_THRESHOLD, _MAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 64 << 20
_LARGEST_BYTES = 32 << 20  # the largest map threshold that glibc takes


def end_on_sigterm() -> None:
    """Exit with 143 on SIGTERM, until another handler is installed: PID 1 has no default action."""
    signal.signal(signal.SIGTERM, _end)


def die_with_parent() -> None:
    """Be killed when the parent ends; leave SIGINT and SIGTERM to the parent."""
    _end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def terminate_with_parent() -> None:
    """Get SIGTERM when the parent ends."""
    _end_with_parent(signal.SIGTERM)


def _end_with_parent(by: signal.Signals) -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it ended before we asked
        sys.exit(1)


def _end(_signal: int, _frame: FrameType | None) -> None:
    os._exit(TERMINATED)


def fitting(max_connections: int, *, files_each: int = 1) -> int:
    """max_connections, or what the limit on open files allows; at least 1."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return max_connections
    return max(1, min(max_connections, (files - _OTHER_FILES) // files_each))


def allow_more_files() -> None:
    """Raise the limit as far as allowed, or enough: shells set 1024."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _ENOUGH_FILES if most == resource.RLIM_INFINITY else min(_ENOUGH_FILES, most)
    if files != resource.RLIM_INFINITY and files < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def trim_memory() -> None:
    """Return freed memory to the kernel, which malloc keeps otherwise."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> bool:
    """Let malloc keep up to 64 MB free; returns whether it does (glibc).

    Else it returns a step's tensors to the kernel and gets zeroed pages again: half the time of a
    norm or a gate of 256 rows (measured).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MAP_THRESHOLD, _LARGEST_BYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))


def start_logging() -> None:
    """Once per process, before anything logs; ends it where the format is unknown."""
    name = os.environ.get(LOG_FORMAT) or "text"
    formatter = FORMATTERS.get(name)
    if formatter is None:
        known = " or ".join(FORMATTERS)
        sys.stderr.write(f"error: {LOG_FORMAT} is {name!r}: set it to {known}\n")
        sys.exit(WRONG_SETTING)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)
    # The format uses none of these, nor the source line; collecting them costs a third of a log
    # line's time.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
