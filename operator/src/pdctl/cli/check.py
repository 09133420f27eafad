"""`pdctl check`: asks the worker's own loader what would serve a model."""

from pathlib import Path
from typing import Annotated

import typer

from pdctl.cli.options import reported
from pdctl.local.checked_model import checked
from pdctl.local.model import folder_of


def check_command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="of a model, or a GGUF file", show_default=False),
    ],
) -> None:
    """Say which code would serve a model, and how fast on this machine's CPU, or why none would."""
    with reported():
        typer.echo(f"{folder}: {checked(folder_of(folder.expanduser()))}")
