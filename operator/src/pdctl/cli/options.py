"""Options, input files and errors (on stderr, with exit codes) that commands share."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from pdcluster_api.errors import StartError
from pdcluster_schema.errors import Fault, InvalidObjectError
from pdcluster_schema.load import load
from pdcluster_schema.pdcluster import PDCluster


def load_file(file: Path) -> PDCluster:
    """Exits with 2 and a line for each fault where the file is not valid."""
    try:
        return load(file)
    except InvalidObjectError as e:
        raise refused(file, e.faults) from e


def refused(file: Path, faults: Iterable[Fault]) -> typer.Exit:
    for fault in faults:
        typer.echo(f"error: {file}: {fault}", err=True)
    return typer.Exit(2)


def failed(error: StartError) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(error.exit_code)


File = Annotated[
    Path, typer.Argument(metavar="FILE", help="a PDCluster object in YAML", show_default=False)
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace", "-n", metavar="NAMESPACE", help="of the cluster; else that of the context"
    ),
]
Context = Annotated[
    str | None, typer.Option(metavar="CONTEXT", help="of the kubeconfig; else its current one")
]
Kubeconfig = Annotated[
    Path | None, typer.Option(metavar="FILE", help="else KUBECONFIG, or ~/.kube/config")
]
StateDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="where runs of pdctl up keep state")
]


def required_file(help_text: str) -> Any:
    """The option --file of a command that needs one."""
    return typer.Option("--file", "-f", metavar="FILE", help=help_text, show_default=False)


STDIN = Path("-")


def read_text(path: Path) -> str:
    """Raises StartError (exit code 2) when it cannot be read."""
    try:
        return sys.stdin.read() if path == STDIN else path.read_text(encoding="utf-8")
    except OSError as e:
        raise StartError(
            f"{path}: cannot be read: {e.strerror or e}; give the path of a file, or - for stdin",
            exit_code=2,
        ) from e
    except UnicodeDecodeError as e:
        raise StartError(f"{path}: is not UTF-8 text; save it as UTF-8", exit_code=2) from e
