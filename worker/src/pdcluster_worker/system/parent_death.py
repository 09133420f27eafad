"""The ends of a process that nothing else sees to: by SIGTERM before anything handles it better,
and with its parent.

Process 1 of a container has no default action for a signal: without a handler
the kernel drops SIGTERM, and the pod stays until it is killed at the end of its
grace period.  And a child whose parent was killed would live on.
"""

import ctypes
import os
import signal
import sys
from types import FrameType

TERMINATED = 128 + signal.SIGTERM

_PR_SET_PDEATHSIG = 1


def end_on_sigterm() -> None:
    """Until another handler is installed, SIGTERM ends this process with status 143, other threads
    and all.
    """
    signal.signal(signal.SIGTERM, _end)


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, and leave signals of a terminal and
    of a container to the parent.
    """
    _end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def terminate_with_parent() -> None:
    """Ask the kernel to send this process SIGTERM when its parent ends."""
    _end_with_parent(signal.SIGTERM)


def _end_with_parent(by: signal.Signals) -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it ended before we asked
        sys.exit(1)


def _end(_signal: int, _frame: FrameType | None) -> None:
    os._exit(TERMINATED)
