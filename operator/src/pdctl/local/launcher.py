"""Execute another program that the kernel kills when the process which started it dies.

    python launcher.py PARENT_PID PROGRAM ARGUMENTS...

A script of the standard library: it starts in milliseconds, and a fork hook (preexec_fn) in the
parent would be unsafe with threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; kept across exec


def main() -> None:
    parent = int(sys.argv[1])
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(1)  # it died before we asked
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
