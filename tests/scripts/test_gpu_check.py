"""`make gpu-check` where there is no GPU; what it does with one needs one."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


def test_without_a_gpu_it_says_so_and_ends_with_2() -> None:
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}

    found = subprocess.run(
        [sys.executable, str(SCRIPT)], env=hidden, capture_output=True, text=True, check=False
    )

    assert found.returncode == 2
    assert "no GPU here" in found.stdout
