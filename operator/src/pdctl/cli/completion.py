"""`pdctl completion`, and what a shell completes: names of clusters that run here, of workers."""

from collections.abc import Iterator
from typing import Annotated, Literal

import typer
from typer.completion import (  # type: ignore[attr-defined] # typer exports them by no __all__
    completion_init,
    get_completion_script,
)

from pdctl.local.run_directory import RunDirectory, default_state_dir, runs

completion_init()  # the classes of shells, which typer has for its own two options alone


def completion_command(
    context: typer.Context,
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(help="that completes", show_default=False)
    ],
) -> None:
    """Print the completion script of a shell: `source <(pdctl completion bash)`, or zsh; for fish
    `pdctl completion fish | source`.
    """
    program = context.find_root().info_name or "pdctl"
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    typer.echo(get_completion_script(prog_name=program, complete_var=variable, shell=shell))


def _alive(context: typer.Context) -> Iterator[RunDirectory]:
    state_dir = context.params.get("state_dir") or default_state_dir()
    return (run for run in runs(state_dir) if run.is_alive)


def _clusters(context: typer.Context) -> list[str]:
    return [run.name for run in _alive(context)]


def _workers(context: typer.Context) -> list[str]:
    """Those of the cluster that is named already, or of all."""
    name = context.params.get("name")
    chosen = [run for run in _alive(context) if name in (None, run.name)]
    return [log.stem for run in chosen for log in sorted(run.logs.glob("*.log"))]


def _clusters_and_workers(context: typer.Context) -> list[str]:
    return [*_clusters(context), *_workers(context)]


def _given(name: str | None) -> str | None:
    """A variable that is not set gives an empty NAME, which does not mean any cluster."""
    if name == "":
        raise typer.BadParameter("is empty; name a cluster, or leave it out")
    return name


Cluster = Annotated[
    str | None,
    typer.Argument(
        callback=_given,
        metavar="NAME",
        help="of the cluster; not needed when one runs here",
        show_default=False,
        autocompletion=_clusters,
    ),
]
ClusterOrWorker = Annotated[
    str | None,
    typer.Argument(
        callback=_given,
        metavar="NAME",
        help="of the cluster; not needed when one runs here, so that a WORKER may stand in its "
        "place",
        show_default=False,
        autocompletion=_clusters_and_workers,
    ),
]
Worker = Annotated[
    str | None,
    typer.Argument(
        metavar="WORKER",
        help="by its name in `pdctl status`, or etcd; else all",
        show_default=False,
        autocompletion=_workers,
    ),
]
