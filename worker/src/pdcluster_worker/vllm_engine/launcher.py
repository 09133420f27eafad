"""Runs one command so that nothing of it outlives the worker: `python -m
pdcluster_worker.vllm_engine.launcher COMMAND...`.

A stock engine is several processes, and those that compute do not notice the end of
the one that they were started by.  This one ends them all: after the command has
ended, and when the worker is gone, whatever it was ended by.  SIGTERM asks the command
to end, and kills all of it after a while; SIGQUIT kills all at once.  It ends with the
command's status.
"""

import contextlib
import os
import signal
import subprocess
import sys
from types import FrameType

from pdcluster_worker.system.parent_death import terminate_with_parent

GRACE_SECONDS = 10
"""Time for the command to end after it was asked."""


def main(command: list[str]) -> int:
    """Run it; returns its exit status, of one that a signal ended as a shell says it."""
    child: subprocess.Popen[bytes] | None = None

    def kill(_signal: int, _frame: FrameType | None) -> None:
        if child is None:
            sys.exit(1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    def on_signal(_signal: int, _frame: FrameType | None) -> None:
        if child is None:
            sys.exit(1)
        child.terminate()
        signal.alarm(GRACE_SECONDS)

    signal.signal(signal.SIGALRM, kill)
    signal.signal(signal.SIGQUIT, kill)
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the worker asks in time
    terminate_with_parent()
    child = subprocess.Popen(command, process_group=0)
    status = child.wait()
    kill(0, None)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
