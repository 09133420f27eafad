"""The commands of pdctl.

Exit codes: 0 = done; 1 = something failed; 2 = invalid input (each fault on a line of stderr).
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from pdcluster_schema.load import applied_fault
from pdcluster_schema.revision import revision_of
from pdcluster_schema.stock_engine import SGLANG, VLLM
from pdctl.cli.bench import app as bench
from pdctl.cli.options import File, Files, load_file, load_files, reported
from pdctl.cli.plan import plan_command
from pdctl.cli.render import render_command
from pdctl.cli.replay import autoscale
from pdctl.cli.status import find_directory, render_status
from pdctl.cli.verify import verify_command
from pdctl.cli.why import why_command
from pdctl.local.run_directory import default_state_dir
from pdctl.local.screen import make_screen
from pdctl.local.up import UpRequest, up

app = typer.Typer(
    name="pdctl",
    help="Serve large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
StateDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="where runs keep state and logs [default: ~/.local/state/pdcluster]"
    ),
]


@app.command("up")
def up_command(
    file: File,
    *,
    port: Annotated[
        int | None,
        typer.Option(
            envvar="PDCLUSTER_PORT",
            min=0,
            max=65535,
            help="where to serve, over spec.service.port; 0 = any free port",
        ),
    ] = None,
    model_path: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="the model's folder; without it spec.model.path where that is here, else "
            "~/.cache/pdcluster/NAME by spec.model.name",
        ),
    ] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(
            envvar="PDCLUSTER_VLLM",
            metavar="PROGRAM",
            help="the vllm program of engine.type: vllm, over that of engine.command; without "
            "either vllm on the PATH",
        ),
    ] = None,
    sglang: Annotated[
        Path | None,
        typer.Option(
            envvar="PDCLUSTER_SGLANG",
            metavar="PROGRAM",
            help="the Python of SGLang's environment, for engine.type: sglang, over the program of "
            "engine.command; without either python3 on the PATH",
        ),
    ] = None,
    progress: Annotated[
        bool, typer.Option(help="a live table; without it a line for each change, for pipes and CI")
    ] = True,
    state_dir: StateDir = None,
) -> None:
    """Run a PDCluster as processes of this machine until Ctrl-C."""
    cluster = load_file(file)
    given = {VLLM: vllm, SGLANG: sglang}
    served = cluster.spec.service.port if port is None else port
    request = UpRequest(
        source=file,
        cluster=cluster,
        port=served,
        state_dir=state_dir or default_state_dir(),
        model_path=model_path,
        programs={name: path for name, path in given.items() if path is not None},
    )
    with reported(file), make_screen(progress=progress) as screen:
        up(request, screen)


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
