"""`pdctl check`: asks the worker's own loader what would serve a model."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from pdcluster_api.errors import StartError
from pdctl.cli.options import reported
from pdctl.local.model import no_folder

_PROGRAM = (sys.executable, "-P", "-m", "pdcluster_worker.processes.check_model")
_ERROR = "error: "


def check_command(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="of a model", show_default=False)
    ],
) -> None:
    """Load a model as a worker would, and say which code would serve it, or why none would."""
    with reported():
        if not folder.expanduser().is_dir():
            raise StartError(no_folder(folder), exit_code=2)
        command = (*_PROGRAM, str(folder.expanduser().absolute()))
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            last = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
            is_refusal = last.startswith(_ERROR)
            raise StartError(last.removeprefix(_ERROR), exit_code=2 if is_refusal else 1)
        typer.echo(f"{folder}: {answer.stdout.strip()}")
