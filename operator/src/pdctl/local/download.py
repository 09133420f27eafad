"""Models and adapters of the hub on this machine, fetched by the worker's own program."""

import io
import subprocess
import sys
from pathlib import Path

from pdcluster_api.errors import StartError
from pdcluster_schema.model import HuggingFaceSpec

_ATTEMPTS = 3  # a user waits, and starts it again, which goes on with what has come
_USERS_MISTAKE = 2


def downloaded(hub: HuggingFaceSpec, target: Path, *options: str) -> Path:
    """The folder of it: that of the hub client's own cache where that is whole, else `target`.

    Shows how far it is on stderr.  Raises StartError.
    """
    program = (sys.executable, "-P", "-m", "pdcluster_worker.fetch")
    source = (f"--repo={hub.repo}", f"--revision={hub.revision}", f"--target={target}")
    bar = ("--bar",) if sys.stderr.isatty() else ()
    command = (*program, *source, "--hub-cache", f"--attempts={_ATTEMPTS}", *bar, *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None, "a pipe"
        assert process.stderr is not None, "a pipe"
        with io.TextIOWrapper(process.stderr, errors="replace", newline="") as lines:
            error = _shown(lines)
        folder = process.stdout.read().decode().strip()
    if process.returncode == 0:
        return Path(folder)
    if process.returncode == _USERS_MISTAKE:
        raise StartError(error, exit_code=2)
    message = f"{error}; start it again to go on with what has come, or give the model's folder"
    raise StartError(message, exit_code=1)


def _shown(lines: io.TextIOWrapper) -> str:
    """Pass on lines, and parts of a bar; returns the last error instead."""
    error = "the download ended"
    for line in lines:
        if line.startswith("error: "):
            error = line.removeprefix("error: ").strip()
        else:
            sys.stderr.write(line)
            sys.stderr.flush()
    return error
