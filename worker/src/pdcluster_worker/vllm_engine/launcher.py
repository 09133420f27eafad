"""`python -m pdcluster_worker.vllm_engine.launcher COMMAND...`: run a command and end all of it.

vLLM's processes do not notice the end of their parent, so the process group is killed after the
command or the worker has ended.  SIGTERM terminates first; SIGQUIT kills at once.
"""

import contextlib
import os
import signal
import subprocess
import sys
from types import FrameType

from pdcluster_worker.system.process import terminate_with_parent

GRACE_SECONDS = 10  # for the command to end after SIGTERM


def main(command: list[str]) -> int:
    """Returns the command's exit status, 128 + n after signal n."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the worker sends SIGTERM
    terminate_with_parent()
    child = subprocess.Popen(command, process_group=0)
    status = child.wait()
    kill(0, None)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
