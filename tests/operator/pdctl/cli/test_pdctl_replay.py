"""Files of `pdctl autoscale replay`; figures and refusals are in tests/golden/operator."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pdctl.cli.main import app
from tests.schema.object_cases import at, minimal

TRACE = "seconds,requests_per_second,input_tokens,output_tokens\n0,1,1000,100\n60,30,1000,100\n"


@pytest.fixture
def replayed(tmp_path: Path) -> Callable[..., Any]:
    """Run it on a small trace and object."""
    trace, file = tmp_path / "burst.csv", tmp_path / "chat.yaml"
    document = minimal()
    at("spec.roles.decode.pools.0.maxReplicas", 4)(document)
    trace.write_text(TRACE)
    file.write_text(yaml.safe_dump(document))
    command = ["autoscale", "replay", str(trace), "-f", str(file)]
    return lambda *options: CliRunner().invoke(app, [*command, *options])


def test_table_decisions_and_picture_are_written(replayed: Callable[..., Any], tmp_path: Path):
    result = replayed("--out", str(tmp_path / "a" / "out"))
    files = {path.name: path for path in (tmp_path / "a" / "out").iterdir()}

    assert result.exit_code == 0
    assert set(files) == {"burst.csv", "burst-decisions.txt", "burst.png", "burst.png.json"}
    for name in files:
        assert f"written              {files[name]}" in result.output.splitlines()
    assert len(files["burst.csv"].read_text().splitlines()) == 25
    decisions = files["burst-decisions.txt"].read_text()
    assert decisions.startswith("chat, 2026-01-05 00:01:")
    assert max(map(len, decisions.splitlines())) <= 100


def test_without_the_picture_matplotlib_is_not_needed(
    replayed: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pdctl.figures.find_spec", lambda name: None)
    out = tmp_path / "out"

    refused = replayed("--out", str(out))
    assert (refused.exit_code, out.exists()) == (1, False)
    assert "pip install matplotlib" in refused.stderr
    assert replayed("--out", str(out), "--no-plot").exit_code == 0
    assert sorted(path.name for path in out.iterdir()) == ["burst-decisions.txt", "burst.csv"]
    assert replayed().exit_code == 0
