"""SIGTERM before anything handles it better: the process ends at once.

Process 1 of a container has no default action for a signal: without a handler
the kernel drops SIGTERM, and the pod stays until it is killed at the end of its
grace period.
"""

import os
import signal
from types import FrameType

TERMINATED = 128 + signal.SIGTERM


def end_on_sigterm() -> None:
    """Until another handler is installed, SIGTERM ends this process with status 143, other threads and all."""
    signal.signal(signal.SIGTERM, _end)


def _end(_signal: int, _frame: FrameType | None) -> None:
    os._exit(TERMINATED)
