"""The kernels are built with whatever compiler is there, and an installation goes on
without one.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from pdcluster_worker.model.ops.kernel_object import LEVELS

WORKER = Path(__file__).parents[4] / "worker"


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of setup.py with this environment: the checkout keeps the objects that it has."""
    shutil.copytree(
        WORKER,
        folder / "worker",
        ignore=shutil.ignore_patterns("*.so", "__pycache__", "proto", "build"),
    )
    command = [
        sys.executable,
        "setup.py",
        "--quiet",
        "build_ext",
        "--build-lib",
        str(folder),
        "--build-temp",
        str(folder / "temp"),
    ]
    return subprocess.run(
        command,
        cwd=folder / "worker",
        env={"PATH": "/nowhere", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_a_compiler_the_build_goes_on_and_says_so(tmp_path):
    ended = build(tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (
        "no kernels of level plain: there is no C compiler: neither ziglang nor CC, cc or gcc"
        in ended.stderr
    )
    assert not list(tmp_path.rglob("*.so"))


def test_a_compiler_that_fails_leaves_its_level_out(tmp_path):
    ended = build(tmp_path, CC="/bin/false")
    assert ended.returncode == 0, ended.stderr
    assert "no kernels of level plain: /bin/false ended with 1" in ended.stderr


def test_the_levels_of_the_build_are_those_that_are_looked_for():
    text = (WORKER / "setup.py").read_text(encoding="utf-8")
    assert all(f'"{level}": "-march' in text for level in LEVELS)
    assert text.count('": "-march') == len(LEVELS)
