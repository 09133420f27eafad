"""Adapters that are read while an engine runs: which folders are, and what each refusal says."""

import json
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import ModelConfig, RuntimeAdaptersConfig
from pdcluster_worker.engine.ports import LoadedAdapter
from pdcluster_worker.errors import ModelError, RequestError
from pdcluster_worker.model.runner import Runner
from pdcluster_worker.model.runner_loader import open_runner
from pdcluster_worker.model.runtime_adapters import RuntimeAdapters
from tests.adapters import make_adapter

MEMORY = 1 << 20
WAIT_SECONDS = 30.0
ENGINE = EngineConfig(num_blocks=8, threads=1)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def root(tiny_folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("allowed")
    make_adapter(tiny_folder("llama"), root / "team/sql")
    return root


@pytest.fixture(scope="module")
def runner(root: Path, tiny_folder) -> Iterator[Runner]:
    allowed = RuntimeAdaptersConfig(str(root), MEMORY)
    model = ModelConfig("m", str(tiny_folder("llama")), "float32", runtime_adapters=allowed)
    runner, _, _ = open_runner(model, ENGINE)
    yield runner
    runner.close()


@pytest.fixture
def adapters(runner: Runner) -> RuntimeAdapters:
    assert runner.adapters is not None
    return runner.adapters


def read(adapters: RuntimeAdapters, path: str | Path) -> LoadedAdapter | RequestError:
    adapters.begin("x", str(path))
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        if found := adapters.take():
            ((name, outcome),) = found
            assert name == "x"
            return outcome
        time.sleep(0.001)
    raise AssertionError("it is not read")


def refusal(adapters: RuntimeAdapters, path: str | Path) -> str:
    outcome = read(adapters, path)
    assert isinstance(outcome, RequestError)
    assert (outcome.status, outcome.param) == (400, "lora_path")
    assert adapters.free_bytes == MEMORY
    return outcome.message


def test_a_folder_is_named_by_itself_or_below_the_root(adapters, root):
    for path in ("team/sql", root / "team/sql", root / "team/../team/sql"):
        loaded = read(adapters, path)
        assert isinstance(loaded, LoadedAdapter)
        assert adapters.free_bytes == MEMORY - loaded.num_bytes
        adapters.remove("x")
        assert adapters.free_bytes == MEMORY


def test_one_that_is_removed_leaves_its_memory_at_once(adapters, runner):
    """Though the last step had it."""
    read(adapters, "team/sql")
    (packed,) = [each for each in runner.forward.adapters if each is not None]
    runner.warm_up()
    memory = weakref.ref(packed[0].qkv._memory)
    del packed
    assert memory() is not None
    adapters.remove("x")
    assert memory() is None


@pytest.mark.parametrize("path", ["..", "../other", "/etc", ".", "", "team/../.."])
def test_a_folder_outside_is_not_read(adapters, root, path):
    assert refusal(adapters, path) == (
        f"lora_path {path!r} is not below {root}, model.runtimeAdapters.path: give a folder in it"
    )


@pytest.mark.parametrize("path", ["a" * 300, "a/" * 2047])
def test_a_path_that_is_too_long_is_refused(adapters, root, path):
    message = refusal(adapters, path)
    assert f"...: File name too long: give a folder below {root} that the worker may" in message
    assert len(message) < 600


@pytest.mark.parametrize("linked", ["folder", WEIGHTS, "adapter_config.json"])
def test_a_link_that_leads_outside_is_not_followed(adapters, root, tmp_path, tiny_folder, linked):
    outside = make_adapter(tiny_folder("llama"), tmp_path / "sql")
    name = f"link to {linked}"
    if linked == "folder":
        (root / name).symlink_to(outside)
    else:
        make_adapter(tiny_folder("llama"), root / name)
        (root / name / linked).unlink()
        (root / name / linked).symlink_to(outside / linked)
    assert "is not below" in refusal(adapters, name)


def rewritten(folder: Path, key: str, value: torch.Tensor) -> None:
    weights = load_file(folder / WEIGHTS)
    save_file(weights | {key: value}, folder / WEIGHTS)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
WRONG = {
    "none is there": (lambda folder: (folder / WEIGHTS).unlink(), "no folder of a LoRA adapter"),
    "of another base": (
        lambda folder: rewritten(folder, Q.format("A"), torch.zeros(8, 128)),
        "adapter x is of another model: model.layers.0.self_attn.q_proj has 128 inputs, and in the "
        "model 64; give an adapter of this model, or leave it out",
    ),
    "of another rank": (
        lambda folder: rewritten(folder, Q.format("B"), torch.zeros(64, 4)),
        "model.layers.0.self_attn.q_proj has rank 8 in lora_A and 4 in lora_B",
    ),
    "cut off": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-99]),
        "no folder of a LoRA adapter of PEFT",
    ),
    "of zeros": (
        lambda folder: (folder / WEIGHTS).write_bytes(bytes(4096)),
        "no folder of a LoRA adapter of PEFT",
    ),
    "of another method": (
        lambda folder: (folder / "adapter_config.json").write_text(
            json.dumps({"r": 8, "lora_alpha": 1, "use_dora": True})
        ),
        "adapter x has use_dora in adapter_config.json, which our engine lacks",
    ),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_one_that_would_be_computed_wrongly_is_refused(adapters, root, tiny_folder, case):
    change, reason = WRONG[case]
    folder = make_adapter(tiny_folder("llama"), root / case)
    change(folder)
    assert reason in refusal(adapters, folder)


def test_a_file_that_cannot_fit_is_not_read(adapters, root, tiny_folder):
    folder = make_adapter(tiny_folder("llama"), root / "large")
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(1 << 40)  # a sparse one
    least = (1 << 40) // 8
    assert refusal(adapters, folder).startswith(f"adapter x needs {least} bytes, and {MEMORY} of")


def test_their_memory_is_counted_when_the_model_is_loaded(root, tiny_folder):
    allowed = RuntimeAdaptersConfig(str(root), 1 << 50)
    model = ModelConfig("m", str(tiny_folder("llama")), "float32", runtime_adapters=allowed)
    with pytest.raises(ModelError, match=rf"\({1 << 50} of adapters\).*model\.runtimeAdapters"):
        open_runner(model, ENGINE)


def test_a_model_that_our_decoder_does_not_run_takes_none(root, tiny_folder):
    allowed = RuntimeAdaptersConfig(str(root), MEMORY)
    model = ModelConfig("m", str(tiny_folder("olmo2")), "float32", runtime_adapters=allowed)
    with pytest.raises(ModelError, match=r"model\.runtimeAdapters needs our own decoder"):
        open_runner(model, ENGINE)
