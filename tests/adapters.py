"""Random LoRA adapters of a model, as PEFT saves them, and the model with their weights added."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    model: Path,
    folder: Path,
    *,
    seed: int = 5,
    rank: int = 8,
    alpha: float = 64,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    merged: Path | None = None,
    **settings: Any,
) -> Path:
    """settings: more of adapter_config.json.  merged: where the model goes with them added."""
    weights = load_file(model / "model.safetensors")
    lora: dict[str, torch.Tensor] = {}
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    draw = torch.Generator().manual_seed(seed)
    for name in [name for name in weights if name.endswith(".weight")]:
        if name.split(".")[-2] not in targets:
            continue
        rows, columns = weights[name].shape
        a = torch.randn(rank, columns, generator=draw) / columns**0.5
        b = torch.randn(rows, rank, generator=draw) / rank**0.5
        path = f"base_model.model.{name.removesuffix('.weight')}"
        lora |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
        weights[name] = weights[name] + scale * (b @ a)
    folder.mkdir(parents=True)
    save_file(lora, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [*targets],
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if merged is not None:
        shutil.copytree(model, merged)
        save_file(weights, merged / "model.safetensors", {"format": "pt"})
    return folder
