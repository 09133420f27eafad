"""The commands of pdctl.

Exit codes: 0 = done; 1 = something failed; 2 = invalid input (each fault on a line of stderr).
"""

from typing import Annotated, Literal

import typer

from pdcluster_schema.load import applied_fault
from pdcluster_schema.revision import revision_of
from pdctl import __version__
from pdctl.cli.bench import app as bench
from pdctl.cli.check import check_command
from pdctl.cli.options import Files, load_files, reported
from pdctl.cli.plan import plan_command
from pdctl.cli.render import render_command
from pdctl.cli.replay import autoscale
from pdctl.cli.status import find_directory, render_status
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
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="of the cluster; not needed when one runs", show_default=False
        ),
    ] = None,
    output: Annotated[
        Literal["table", "json"],
        typer.Option("--output", "-o", help="json has every address, pid and file"),
    ] = "table",
    state_dir: StateDir = None,
) -> None:
    """Show the workers of a cluster that runs on this machine."""
    with reported():
        run, state = find_directory(state_dir or default_state_dir(), name)
        typer.echo(render_status(state | run.read_transfers() | run.read_remarks(), output))


@app.command("validate")
def validate_command(files: Files) -> None:
    """Check PDCluster files and name everything that is wrong in each."""
    for file, cluster in load_files(files):
        revision = revision_of(cluster.spec)
        fault = applied_fault(cluster)
        unfit = "" if fault is None else f", for pdctl up alone: {fault}"
        typer.echo(f"{file}: {cluster.metadata.name} is valid, revision {revision}{unfit}")


app.command("why")(why_command)
app.command("verify")(verify_command)
app.command("plan")(plan_command)
app.command("render")(render_command)
app.add_typer(autoscale, name="autoscale")
app.add_typer(bench, name="bench")


def main() -> None:
    app()
