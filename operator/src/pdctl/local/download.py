"""Models and adapters of the hub, and models of GGUF files, on this machine: made by the worker's
own programs.
"""

import hashlib
import io
import subprocess
import sys
from pathlib import Path

from pdcluster_api.errors import StartError
from pdcluster_schema.model import HuggingFaceSpec
from pdctl.local.machine import require_worker

_ATTEMPTS = 3  # a user waits, and starts it again, which goes on with what has come
_USERS_MISTAKE = 2


def downloaded(hub: HuggingFaceSpec, target: Path, *options: str) -> Path:
    """The folder of it, or its GGUF file, in the hub client's own cache where that is whole, else
    `target`.

    Shows how far it is on stderr.  Raises StartError.
    """
    source = (f"--repo={hub.repo}", f"--revision={hub.revision}", f"--target={target}")
    fix = "; start it again to go on with what has come, or give the model's folder"
    command = ("fetch", *source, "--hub-cache", f"--attempts={_ATTEMPTS}", *options)
    return Path(_output(command, fix))


def converted(gguf: Path, cache: Path) -> Path:
    """The folder made of a GGUF file as it is now, once.

    Shows how far it is on stderr.  Raises StartError.
    """
    found = gguf.stat()
    state = f"{gguf} {found.st_size} {found.st_mtime_ns}"
    target = cache / f"{gguf.stem}--{hashlib.sha256(state.encode()).hexdigest()[:12]}"
    _output(("fetch.gguf_file", str(gguf), str(target)), "")
    return target


def _output(command: tuple[str, ...], fix: str) -> str:
    """Run a program of the worker; returns what it prints.

    fix: of errors after which it may go well another time
    Raises StartError.
    """
    require_worker()
    module, *arguments = command
    bar = ("--bar",) if sys.stderr.isatty() else ()
    program = (sys.executable, "-P", "-m", f"pdcluster_worker.{module}", *arguments, *bar)
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None, "a pipe"
        assert process.stderr is not None, "a pipe"
        with io.TextIOWrapper(process.stderr, errors="replace", newline="") as lines:
            try:
                error = _shown(lines)
            except KeyboardInterrupt:  # it gets the same, and says what follows
                _shown(lines)
                raise
        printed = process.stdout.read().decode().strip()
    if process.returncode == _USERS_MISTAKE:
        raise StartError(error, exit_code=2)
    if process.returncode != 0:
        raise StartError(f"{error}{fix}", exit_code=1)
    return printed


def _shown(lines: io.TextIOWrapper) -> str:
    """Pass on lines, and parts of a bar; returns the last error instead."""
    error = "the program that makes the model's folder ended"
    for line in lines:
        if line.startswith("error: "):
            error = line.removeprefix("error: ").strip()
        else:
            sys.stderr.write(line)
            sys.stderr.flush()
    return error
