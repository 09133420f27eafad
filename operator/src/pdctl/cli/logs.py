"""`pdctl logs`: the log files of a cluster that runs, or ran last, on this machine."""

import itertools
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from pdcluster_api.errors import StartError
from pdctl.cli.completion import ClusterOrWorker, Worker
from pdctl.cli.options import StateDir, reported
from pdctl.cli.status import find_directory
from pdctl.local.run_directory import RunDirectory, default_state_dir, runs

_POLL_SECONDS = 0.2
_COLORS = ("cyan", "green", "yellow", "blue", "magenta")


class LogFile:
    """Lines of a file that a worker appends to, and each worker that takes its place."""

    def __init__(self, path: Path, tail: int | None) -> None:
        """tail: how many of the lines that are there are read; None = all"""
        self._path, self._tail = path, tail
        self._position = 0
        self._rest = b""

    def read(self) -> Iterable[str]:
        """Whole lines since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            *lines, self._rest = (self._rest + file.read()).split(b"\n")
            self._position = file.tell()
        chosen, self._tail = deque(lines, maxlen=self._tail), None
        return (line.decode(errors="replace") for line in chosen)

    def last(self) -> str:
        """A line that was not ended."""
        return self._rest.decode(errors="replace")


def logs_command(
    name: ClusterOrWorker = None,
    worker: Worker = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="go on with what is logged, until it ends")
    ] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="the last lines of each worker; else all")
    ] = None,
    state_dir: StateDir = None,
) -> None:
    """Print the logs of a cluster that runs on this machine, or of NAME's last run, by worker."""
    with reported():
        run, worker = _chosen(state_dir or default_state_dir(), name, worker)
        if not run.is_alive:
            typer.echo(f"{run.name} has ended; these are the logs of its last run", err=True)
        _print(run, worker, tail, follow=follow)


def _chosen(
    state_dir: Path, name: str | None, worker: str | None
) -> tuple[RunDirectory, str | None]:
    """Raises StartError where there is no such run, or it has no such worker."""
    found = runs(state_dir, name) if name is not None else []
    if name is not None and worker is None and not found:
        run, worker = find_directory(state_dir, None)[0], name
    else:
        run = found[-1] if found else find_directory(state_dir, name)[0]
    names = sorted(log.stem for log in run.logs.glob("*.log"))
    if worker not in (None, *names):
        raise StartError(
            f"{run.name} has no worker {worker}; give one of {', '.join(names)}", exit_code=2
        )
    return run, worker


def _print(run: RunDirectory, worker: str | None, tail: int | None, *, follow: bool) -> None:
    files: dict[str, LogFile] = {}
    colors = itertools.cycle(_COLORS)
    prefixes: dict[str, str] = {}
    while True:
        is_alive = run.is_alive
        found = sorted(run.logs.glob(f"{worker or '*'}.log"))
        width = max((len(path.stem) for path in found), default=0)
        for path in found:
            if path.stem not in files:
                files[path.stem] = LogFile(path, tail)
                prefixes[path.stem] = typer.style(f"{path.stem:{width}} | ", fg=next(colors))
            for line in files[path.stem].read():
                typer.echo(prefixes[path.stem] + line)
        if not (follow and is_alive):
            break
        time.sleep(_POLL_SECONDS)
    for name, file in files.items():
        if rest := file.last():
            typer.echo(prefixes[name] + rest)
