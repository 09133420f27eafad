"""LoRA adapters that our engine would compute wrongly: each is refused by its name, with the limit
and the fix.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import ModelConfig
from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.kv_size import check_memory
from pdcluster_worker.model.loading.adapter import with_adapters
from pdcluster_worker.model.loading.loader import load_model
from pdcluster_worker.model.ops.adapter_arguments import PackedProduct
from pdcluster_worker.model.ops.adapters import AdaptedProduct
from pdcluster_worker.model.runner_loader import open_runner
from tests.adapters import make_adapter

FIX = "give an adapter without it, or merge it into a model of its own"
SAVED = "give the folder as PEFT saved it"
Q = "model.layers.0.self_attn.q_proj"
OTHER = "give an adapter of this model, or leave it out"


@pytest.fixture(scope="module")
def loaded(tiny_folder):
    return load_model(tiny_folder("llama"), "float32", block_size=16, threads=1)


@pytest.fixture
def folder(tiny_folder, tmp_path) -> Path:
    return make_adapter(tiny_folder("llama"), tmp_path / "sql")


def settings(**changed: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_bytes()) | changed))

    return change


def weights(key: str, value: torch.Tensor | None) -> Callable[[Path], None]:
    """One more, or another one, or None in its place."""

    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        found = load_file(path)
        found.pop(key, None)
        save_file(found if value is None else found | {key: value}, path)

    return change


def lora(half: str, module: str = Q) -> str:
    return f"base_model.model.{module}.lora_{half}.weight"


def deep(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({lora("A"): torch.zeros(600, 64), lora("B"): torch.zeros(64, 600)}, path)
    settings(r=600)(folder)


WRONG = {
    "a folder without weights": (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        "adapter_model.safetensors'; give one, with adapter_config.json and "
        "adapter_model.safetensors",
    ),
    "a file that is none": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 99),
        "sql is no folder of a LoRA adapter of PEFT: ",
    ),
    "settings that are none": (
        lambda folder: (folder / "adapter_config.json").write_text("[]"),
        "sql is no folder of a LoRA adapter of PEFT: ",
    ),
    "another method": (
        settings(peft_type="IA3"),
        f"has peft_type IA3 in adapter_config.json, not LORA: {FIX}",
    ),
    "DoRA": (
        settings(use_dora=True),
        f"has use_dora in adapter_config.json, which our engine lacks: {FIX}",
    ),
    "bias": (settings(bias="all"), f"has bias all in adapter_config.json, not none: {FIX}"),
    "whole modules": (
        settings(modules_to_save=["lm_head"]),
        f"has modules_to_save in adapter_config.json, which our engine lacks: {FIX}",
    ),
    "a scale for each module": (
        settings(alpha_pattern={"q_proj": 3}),
        f"has alpha_pattern in adapter_config.json, which our engine lacks: {FIX}",
    ),
    "a rank that is too high": (
        deep,
        f"has rank 600 in {Q}, and a rank is from 1 to 512: give one of a lower rank, or merge it "
        "into a model of its own",
    ),
    "another rank": (
        settings(r=16),
        f"has rank 8 in {Q}, and r is 16 in adapter_config.json: {SAVED}",
    ),
    "a module that is not adapted": (
        weights(lora("A", "lm_head"), torch.zeros(8, 64)),
        "changes lm_head (base_model.model.lm_head.lora_A.weight), and our engine adapts q_proj, "
        f"k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj of this model's 2 layers: {FIX}",
    ),
    "a layer that is missing": (
        weights(lora("A", "model.layers.2.self_attn.q_proj"), torch.zeros(8, 64)),
        "changes q_proj (base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight), and our "
        "engine adapts",
    ),
    "a vector of magnitudes": (
        weights(f"base_model.model.{Q}.lora_magnitude_vector", torch.zeros(64)),
        f"changes lora_magnitude_vector (base_model.model.{Q}.lora_magnitude_vector)",
    ),
    "another model": (
        weights(lora("A"), torch.zeros(8, 128)),
        f"is of another model: {Q} has 128 inputs, and in the model 64; {OTHER}",
    ),
    "outputs of another model": (
        weights(lora("B"), torch.zeros(96, 8)),
        f"is of another model: {Q} has 96 outputs, and in the model 64; {OTHER}",
    ),
    "halves of two ranks": (
        weights(lora("B"), torch.zeros(64, 4)),
        f"sql: {Q} has rank 8 in lora_A and 4 in lora_B: {SAVED}",
    ),
    "half of a pair": (weights(lora("B"), None), f"lacks {Q}.lora_B.weight: {SAVED}"),
    "no numbers": (
        weights(lora("A"), torch.zeros(8, 64, dtype=torch.int8)),
        f"sql: {Q} is torch.int8 [8, 64], not numbers in rows and columns: {SAVED}",
    ),
    "a half under two names": (
        weights(f"{Q}.lora_B.weight", torch.zeros(64, 8)),
        f"sql has {Q}.lora_B.weight twice: {SAVED}",
    ),
    "weights that are no numbers": (
        weights(lora("B"), torch.full((64, 8), float("nan"))),
        f"sql: {Q} has a weight that is not finite in float32: train it again, or leave it out",
    ),
    "a scale that is no number": (
        settings(lora_alpha=float("nan")),
        f"sql: lora_alpha is nan in adapter_config.json, not a finite number: {SAVED}",
    ),
    "a rank that is no number": (
        settings(r=float("inf")),
        "sql is no folder of a LoRA adapter of PEFT: ",
    ),
    "a start that takes weights from the model": (
        settings(init_lora_weights="pissa_niter_16"),
        "has init_lora_weights pissa_niter_16 in adapter_config.json, so its weights are those of "
        "a changed model: save it with path_initial_model_for_weight_conversion, or merge it into "
        "a model of its own",
    ),
    "nothing": (
        lambda folder: save_file({}, folder / "adapter_model.safetensors"),
        f"has no weights in adapter_model.safetensors: {SAVED}",
    ),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_an_adapter_that_would_be_computed_wrongly_is_refused(loaded, folder, case):
    change, reason = WRONG[case]
    change(folder)
    with pytest.raises(ModelError) as refused:
        with_adapters(loaded, {"sql": str(folder)})
    assert reason in str(refused.value)
    assert str(refused.value).startswith("adapter sql")


@pytest.mark.parametrize("kind", [True, False, "gaussian", "eva"])
def test_starts_that_leave_the_model_as_it_is_are_taken(loaded, folder, kind):
    settings(init_lora_weights=kind)(folder)
    assert with_adapters(loaded, {"sql": str(folder)}).info.adapters == ("sql",)


def test_ranks_by_pattern_scale_by_their_own(tiny_folder, loaded, folder):
    settings(r=4, rank_pattern={"q_proj": 8, "v_proj": 8})(folder)
    (adapter,) = with_adapters(loaded, {"sql": str(folder)}).checkpoint.adapters
    assert {part.scale for part in adapter.parts.values()} == {64 / 8}


def test_a_model_of_transformers_module_has_no_adapters(tiny_folder, folder):
    olmo = load_model(tiny_folder("olmo2"), "float32", block_size=16, threads=1)
    with pytest.raises(ModelError, match=r"model\.adapters needs our own decoder: .*; leave it"):
        with_adapters(olmo, {"sql": str(folder)})


def test_an_adapter_of_experts_is_refused(tiny_folder, tmp_path):
    model = tiny_folder("qwen3-moe")
    folder = make_adapter(model, tmp_path / "sql", targets=("down_proj",))
    loaded = load_model(model, "float32", block_size=16, threads=1)
    text = r"changes experts \(.*mlp\.experts\.\d\.down_proj.* our engine adapts q_proj"
    with pytest.raises(ModelError, match=text):
        with_adapters(loaded, {"sql": str(folder)})


def test_an_engine_does_not_start_with_a_wrong_one(tiny_folder, folder):
    settings(use_dora=True)(folder)
    model = ModelConfig(
        "m", str(tiny_folder("llama")), "float32", adapter_paths={"sql": str(folder)}
    )
    with pytest.raises(ModelError, match="adapter sql has use_dora"):
        open_runner(model, EngineConfig(num_blocks=8, threads=1))


def test_weights_names_and_scales_are_in_the_fingerprint(tiny_folder, loaded, tmp_path):
    model = tiny_folder("llama")
    folders = {
        "one": make_adapter(model, tmp_path / "one"),
        "seed": make_adapter(model, tmp_path / "seed", seed=6),
        "alpha": make_adapter(model, tmp_path / "alpha", alpha=32),
        "rslora": make_adapter(model, tmp_path / "rslora", use_rslora=True),
    }
    found = [with_adapters(loaded, {"sql": str(path)}) for path in folders.values()]
    found += [with_adapters(loaded, {"law": str(folders["one"])}), loaded]
    assert len({each.info.weights for each in found}) == len(found)
    both = {"a": str(folders["one"]), "b": str(folders["seed"])}
    other = dict(reversed(both.items()))
    assert with_adapters(loaded, both).info.weights == with_adapters(loaded, other).info.weights


def test_weights_are_not_copied_before_they_are_packed(tiny_folder, folder):
    model = load_model(tiny_folder("llama"), "bfloat16", block_size=16, threads=1)
    (adapter,) = with_adapters(model, {"sql": str(folder)}).checkpoint.adapters
    assert {half.dtype for part in adapter.parts.values() for half in (part.a, part.b)} == {
        torch.float32  # as the file has them
    }


@pytest.mark.parametrize("rank", [1, 8, 20])
def test_counted_bytes_are_those_that_a_cpu_holds(tiny_folder, loaded, tmp_path, rank):
    folder = make_adapter(tiny_folder("llama"), tmp_path / "sql", rank=rank)
    adapted = with_adapters(loaded, {"sql": str(folder)})
    taken: list[int] = []

    def take(num_bytes: int) -> torch.Tensor:
        taken.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    for part in adapted.checkpoint.adapters[0].parts.values():
        PackedProduct(AdaptedProduct([part], len(part.b)), take)
    assert sum(taken) == adapted.adapter_bytes


def test_adapters_that_do_not_fit_are_refused_with_their_bytes(loaded, folder):
    adapted = with_adapters(loaded, {"sql": str(folder)})
    assert adapted.adapter_bytes == 4 * 2 * (16 * (64 + 64) + 8 * (64 + 32))
    assert adapted.weight_bytes == loaded.weight_bytes + adapted.adapter_bytes
    with pytest.raises(ModelError) as refused:
        check_memory(
            adapted.weight_bytes,
            1000,
            EngineConfig(),
            adapted.weight_bytes,
            adapter_bytes=adapted.adapter_bytes,
        )
    assert str(refused.value).startswith(
        f"{adapted.weight_bytes} bytes of weights ({adapted.adapter_bytes} of adapters) and 1000 "
        "of KV blocks do not fit into the memory of this worker"
    )
    assert "have less of model.adapters" in str(refused.value)
