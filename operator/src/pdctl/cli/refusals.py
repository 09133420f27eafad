"""Errors on stderr, and their exit codes."""

from collections.abc import Iterable
from pathlib import Path

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
