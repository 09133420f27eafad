"""A script of scripts/, run as `make check` runs it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_script(name: str, *arguments: Path | str) -> subprocess.CompletedProcess[str]:
    """From the root of the repository; its output and exit status are in the result."""
    command = [sys.executable, ROOT / "scripts" / name, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
