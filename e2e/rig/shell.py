"""Commands of this machine: run one and fail with its words, install Debian packages that are
missing.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from e2e.rig.paths import REPOSITORY


class CommandError(Exception):
    """A command failed: which, with what status, and the end of what it said."""


def run(
    command: Sequence[object],
    *,
    environment: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> str:
    """Run a command to its end and return its stdout.  Raises CommandError."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        env=dict(environment) if environment else None,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CommandError(
            f"{' '.join(words[:6])}: exit {done.returncode}\n{(done.stderr or done.stdout)[-3000:]}"
        )
    return done.stdout


def environment() -> dict[str, str]:
    """Environment for programs of ours as processes of their own."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say what is being done, and how long it took."""
    print(f"cluster: {what} ...", flush=True)
    start = time.monotonic()
    yield
    print(f"cluster: {what}: {time.monotonic() - start:.0f} s", flush=True)


def install_packages(commands: Mapping[str, str]) -> None:
    """Install the Debian packages whose commands are missing.  `commands`: the path or name of a
    command -> its package.

    Raises CommandError when apt-get fails, or when this is no Debian and a user has to install
    them.
    """
    missing = sorted(
        {package for command, package in commands.items() if shutil.which(command) is None}
    )
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CommandError(
            f"missing packages: {' '.join(missing)}: install them, or run as root on Debian and "
            "they are installed for you"
        )
    # RUNLEVEL=1: Debian starts no service of a package then; the cluster runs its own containerd.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    with step(f"installing Debian packages: {' '.join(missing)}"):
        run(["apt-get", "update", "-qq"], environment=environment)
        run(
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing],
            environment=environment,
        )
