"""Become another program that dies when the process which started this one dies.

    python launcher.py PARENT_PID PROGRAM ARGUMENTS...

The kernel sends SIGKILL when the parent's thread ends, however it ends.  Run
as a script with the standard library only, so that it costs milliseconds; a
fork hook in the parent would be unsafe beside its threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; kept across exec


def main() -> None:
    """Ask for the signal, make sure that the parent still lives, and become the program."""
    parent = int(sys.argv[1])
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(1)  # it died before we asked
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
