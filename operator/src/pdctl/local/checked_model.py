"""Checks of a model by the worker's own loader."""

import subprocess
import sys
from pathlib import Path

from pdcluster_api.errors import StartError
from pdctl.local.machine import require_worker

_PROGRAM = (sys.executable, "-P", "-m", "pdcluster_worker.processes.check_model")
_ERROR = "error: "


def checked(folder: Path, *options: str) -> str:
    """Say which code would serve it; with --config whether any would, by config.json alone.

    Raises StartError where none would.
    """
    require_worker()
    command = (*_PROGRAM, str(folder), *options)
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
        is_refusal = last.startswith(_ERROR)
        raise StartError(last.removeprefix(_ERROR), exit_code=2 if is_refusal else 1)
    return answer.stdout.strip()
