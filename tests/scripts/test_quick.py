"""Choice of `make quick`, and that its tests hold to one process without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import FOLDERS, ROOT, is_quick


@pytest.mark.parametrize(
    ("line", "quick"),
    [
        ("import json", True),
        ("import torch", False),
        ("from torch import nn", False),
        ("import subprocess", False),
        ("from pdcluster_worker.model.loading.loader import ModelInfo", False),
        ("from tests.system.etcd_server import EtcdServer", False),
        ("from pdcluster_worker.models import Model", True),
    ],
)
def test_a_file_is_left_out_by_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, quick: bool
) -> None:
    monkeypatch.setattr("tests.quick.ROOT", tmp_path)
    (file := tmp_path / FOLDERS[0] / "test_one.py").parent.mkdir(parents=True)
    file.write_text(f"import os\n{line}\n")

    assert is_quick(file) is quick


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import torch", "imports torch"),
        ("import os; os.system('true'); os.posix_spawn('/bin/true', ['true'], {})", "starts a pro"),
        ("from asyncio import subprocess as s; s.subprocess.run(['true'])", "starts a process"),
        ("1 + 1", ""),
    ],
)
def test_a_test_that_is_slow_all_the_same_fails(tmp_path: Path, line: str, message: str) -> None:
    for folder in ("tests", FOLDERS[0]):
        (tmp_path / folder).mkdir()
    (tmp_path / FOLDERS[0] / "test_one.py").write_text(f"def test_one():\n    {line}\n")
    (tmp_path / "tests" / "quick.py").write_text((ROOT / "tests" / "quick.py").read_text())
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.quick"]\n')
    command = [sys.executable, "-m", "pytest", "-q", "--quick", "-p", "no:cacheprovider"]
    # without plugins, whose options CI gives
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert (result.returncode, message in result.stdout) == (1 if message else 0, True), result
