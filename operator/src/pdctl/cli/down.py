"""`pdctl down`: ends a cluster that runs on this machine."""

from typing import Annotated

import typer

from pdctl.cli.completion import Cluster
from pdctl.cli.options import StateDir, reported
from pdctl.cli.status import find_directory
from pdctl.local.ending import end_run
from pdctl.local.run_directory import default_state_dir
from pdctl.local.screen import make_screen
from pdctl.local.watcher import rows_of


def down_command(
    name: Cluster = None,
    *,
    now: Annotated[
        bool, typer.Option("--now", help="end answers that are under way, as a second Ctrl-C does")
    ] = False,
    state_dir: StateDir = None,
) -> None:
    """Drain and end a cluster that runs on this machine, as Ctrl-C does in its terminal."""
    with reported(), make_screen(progress=True) as screen:
        run, state = find_directory(state_dir or default_state_dir(), name)
        if not now:
            screen.echo(f"draining {run.name}; `pdctl down {run.name} --now` ends it at once")
        end_run(run, lambda: screen.show(rows_of(run.read_all())), hurry=now)
        etcd = ", its etcd" if state["etcd"]["pid"] else ""
        workers = ", ".join(worker["name"] for worker in state["workers"])
        screen.echo(f"{run.name} has ended: process {run.pid}{etcd}, {workers}")
