"""`pdctl check`: the verdict of the worker's loader on folders of models."""

import json
import re
import sys
from pathlib import Path

import pytest

from pdctl.local import checked_model
from tests.make_tiny_model import make_tiny_model
from tests.system.pdctl import pdctl

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("family", "verdict"),
    [
        ("llama", "served by the engine's own decoder: "),
        ("olmo2", "served by transformers' code on CPUs, which is slower, since "),
    ],
)
def test_the_code_that_would_serve_is_named(family: str, verdict: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path / "tiny")
    found = pdctl("check", str(folder))

    assert found.exit_code == 0, found.output
    assert found.output.startswith(f"{folder}: {verdict}")
    assert re.search(
        r"; about \d+ tokens/s of prefill and \d+ tokens/s of decode for one request on \d+ CPU "
        "threads, measured once\n$",
        found.output,
    )


def test_python_files_of_the_model_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny")
    (folder / "torch.py").write_text("raise SystemExit('it was run')")
    monkeypatch.chdir(folder)

    assert pdctl("check", ".").exit_code == 0


def test_a_refusal_gives_the_reason_and_the_way_out(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"kv_lora_rank": 8}))
    found = pdctl("check", str(folder))

    assert found.exit_code == 2
    assert found.output == (
        "error: model type llama cannot be served: it uses multi-head latent attention "
        "(kv_lora_rank) (only decoder-only models with full or sliding attention can: set "
        "model.path to one, or engine.type: vllm, if vLLM serves this one)\n"
    )


def test_a_worker_that_is_not_installed_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_model, "_PROGRAM", (sys.executable, "-m", "not_installed"))
    found = pdctl("check", str(tmp_path))

    assert found.output == f"error: {sys.executable}: No module named not_installed\n"
    assert found.exit_code == 1
