"""`make gpu-run` where there is no GPU; what it does with one needs one."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_run.py"


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_gpu_it_says_so_and_ends_with_2() -> None:
    found = run()

    assert found.returncode == 2
    assert "no GPU here" in found.stdout


def test_a_part_that_fails_stops_no_other(tmp_path: Path) -> None:
    """Without a pack there are no models for `tokens`; `sampling` needs none."""
    found = run(
        "--rehearse",
        "--parts",
        "tokens",
        "sampling",
        "--pack",
        str(tmp_path / "none"),
        "--out",
        str(tmp_path),
    )

    report = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert found.returncode == 1
    assert "failed: tokens" in found.stdout
    assert report["tokens"]["status"] == 1
    assert report["sampling"]["status"] == 0
    assert all(figure.get("equal", True) for figure in report["sampling"]["figures"].values())


def test_every_part_is_a_program() -> None:
    spec = importlib.util.spec_from_file_location("gpu_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_run"] = module
    spec.loader.exec_module(module)

    assert all((module.PARTS / f"{part.name}.py").exists() for part in module.ALL)
