"""Ends processes on SIGTERM before a handler is installed, and with their parent.

PID 1 of a container has no default action for SIGTERM.
"""

import ctypes
import os
import signal
import sys
from types import FrameType

TERMINATED = 128 + signal.SIGTERM

_PR_SET_PDEATHSIG = 1


def end_on_sigterm() -> None:
    """Exit with 143 on SIGTERM, until another handler is installed."""
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
