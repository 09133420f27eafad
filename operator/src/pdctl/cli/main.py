"""The commands of pdctl.

Exit codes: 0 = done; 1 = something failed; 2 = invalid input (each fault on a line of stderr).
"""

import inspect
from pathlib import Path
from typing import Annotated, Literal

import typer

from pdcluster_schema.load import applied_fault, load_all
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdctl import __version__
from pdctl.cli.bench import app as bench
from pdctl.cli.chat import chat_command
from pdctl.cli.check import check_command
from pdctl.cli.completion import Cluster, completion_command
from pdctl.cli.down import down_command
from pdctl.cli.logs import logs_command
from pdctl.cli.options import Files, fitting, load_files, reported
from pdctl.cli.plan import plan_command
from pdctl.cli.render import render_command
from pdctl.cli.replay import autoscale
from pdctl.cli.rollout import app as rollout
from pdctl.cli.schema import schema_command
from pdctl.cli.simulate import simulate_command
from pdctl.cli.status import find_directory, render_status, watch_status
from pdctl.cli.up import StateDir, init_command, up_command
from pdctl.cli.verify import verify_command
from pdctl.cli.why import why_command
from pdctl.local.run_directory import default_state_dir

app = typer.Typer(
    name="pdctl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"pdctl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="show the version and exit", is_eager=True, callback=_show_version
        ),
    ] = False,
) -> None:
    """Serve large language models with prefill and decode on separate workers."""


app.command("up")(up_command)
app.command("init")(init_command)
app.command("check")(check_command)


@app.command("status")
def status_command(
    name: Cluster = None,
    *,
    output: Annotated[
        Literal["table", "json"],
        typer.Option("--output", "-o", help="json has every address, pid and file"),
    ] = "table",
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            "-w",
            help="show each change until the cluster ends: a live table on a terminal, else a line "
            "for each change; exits with 0 where it was drained, or ended by `pdctl down`, and "
            "with 1 where it failed or was killed",
        ),
    ] = False,
    state_dir: StateDir = None,
) -> None:
    """Show the workers of a cluster that runs on this machine."""
    with reported():
        run, state = find_directory(state_dir or default_state_dir(), name)
        if watch:
            watch_status(run, output)
        else:
            typer.echo(render_status(state | run.read_all(), output))


app.command("chat")(chat_command)
app.command("logs")(logs_command)
app.command("down")(down_command)


@app.command("validate")
def validate_command(files: Files) -> None:
    """Check PDCluster files and name everything that is wrong in each."""

    def loaded(file: Path) -> list[PDCluster]:
        return [fitting(cluster, file) for cluster in load_all(file)]

    for file, clusters in load_files(files, loaded):
        for cluster in clusters:
            revision = revision_of(cluster.spec)
            fault = applied_fault(cluster)
            unfit = "" if fault is None else f", for pdctl up alone: {fault}"
            typer.echo(f"{file}: {cluster.metadata.name} is valid, revision {revision}{unfit}")


app.command("why")(why_command)
app.command("verify")(verify_command)
app.command("plan")(plan_command)
app.command("simulate")(simulate_command)
app.command("render")(render_command)
app.command("schema")(schema_command)
app.command("completion")(completion_command)
app.add_typer(rollout, name="rollout")
app.add_typer(autoscale, name="autoscale")
app.add_typer(bench, name="bench")


def _rewrapped(group: typer.Typer) -> None:
    """Give each command its docstring with whole paragraphs, for typer keeps a list's line ends."""
    for each in group.registered_commands:
        paragraphs = inspect.cleandoc((each.callback and each.callback.__doc__) or "").split("\n\n")
        each.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for below in group.registered_groups:
        if below.typer_instance is not None:
            _rewrapped(below.typer_instance)


_rewrapped(app)


def main() -> None:
    app()
