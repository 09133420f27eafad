"""Environment of pdctl's commands; what they print is in tests/golden/operator."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdctl.cli.main import app

ROOT = Path(__file__).parents[4]


def test_up_takes_the_port_from_the_environment(
    document: dict[str, Any],
    write_document: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDCLUSTER_PORT", "no")

    assert CliRunner().invoke(app, ["up", str(write_document(document))]).exit_code == 2


def test_without_a_kubeconfig_that_of_the_home_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["why", "chat"])

    assert result.exit_code == 2
    assert f"no file {tmp_path}/.kube/config;" in result.stderr


def test_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "operator/pyproject.toml").read_text())["project"]

    assert CliRunner().invoke(app, ["--version"]).stdout == f"pdctl {project['version']}\n"


def test_module_is_pdctl() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pdctl", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "NO_COLOR": "1"},
    )

    assert all(command in result.stdout for command in ("up", "status", "validate"))


@pytest.mark.parametrize("command", ["up", "init", "check"])
def test_a_path_that_cannot_be_looked_at_is_named(command: str) -> None:
    """As rights of a folder would do it to a user who is not root."""
    result = CliRunner().invoke(app, [command, f"{'a' * 256}/model"])

    assert result.exit_code == 2
    assert result.stderr.startswith("error: aaaa")
    assert "File name too long; correct the path, or give this user the right to it" in (
        result.stderr
    )
