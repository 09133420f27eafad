"""Gives a program a mount namespace of its own whose root is the root directory that we see.

    python e2e/rig/own_root.py COMMAND ARGUMENT...

In a chroot the two differ: `/` is no mount there, which container tools refuse
("remount /: invalid argument"), and a process that enters a container's namespace
comes out at the machine's root.  Mounts that the program leaves end with it.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWNET, MNT_DETACH = 0x20000, 0x40000000, 2


def with_own_root(command: Sequence[object]) -> list[object]:
    """The command line that runs `command` so."""
    return [sys.executable, Path(__file__), *command]


def enter_own_root() -> None:
    """Make this process's root directory the root of its mount namespace, which must be its own,
    and keep its mounts to it.

    On a machine that is no chroot there is nothing to exchange.
    """
    local, root = Path.cwd(), os.open("/", os.O_PATH)
    with Path("/proc/self/ns/mnt").open() as namespace:
        # its own: sets the root directory to the namespace's
        _call(LIBC.setns, namespace.fileno(), CLONE_NEWNS)
    place = str(Path(f"/proc/self/fd/{root}").readlink())
    os.close(root)
    run("mount", "--make-rprivate", "/")
    if place != "/":
        run("mount", "--rbind", place, place)
        machine = os.open("/", os.O_PATH)
        os.chdir(place)
        run("pivot_root", ".", ".")  # the machine's root now lies over the new one
        os.fchdir(machine)
        os.close(machine)
        _call(LIBC.umount2, b".", MNT_DETACH)
    os.chdir(local)


def enter_own_network() -> None:
    """Give this process a network namespace of its own, without an interface."""
    _call(LIBC.unshare, CLONE_NEWNET)


def run(*command: object) -> None:
    """Run a command of the machine to its end.  Raises CalledProcessError."""
    subprocess.run([str(word) for word in command], check=True)


def _call(function: Callable[..., int], *arguments: object) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{arguments}: {os.strerror(number)}")


if __name__ == "__main__":
    _call(LIBC.unshare, CLONE_NEWNS)
    enter_own_root()
    os.execvp(sys.argv[1], sys.argv[1:])
