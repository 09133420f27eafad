"""Tests of Triton kernels in its interpreter, in a process of their own, or on a GPU
(`make gpu-run`).

Triton decides when it is imported which of the two it is, so the process of the
other tests only starts the one that interprets.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = os.environ.get("PDCLUSTER_GPU_CHECK") == "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def interpret(path: str) -> None:
    """Run all tests of a file in a process that interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    found = subprocess.run(
        [*command, path],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert " passed" in found.stdout
