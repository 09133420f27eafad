"""LoRA adapters of a stock engine: that each fits the model, before the engine ends by one."""

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdcluster_worker.config.worker import WorkerConfig
from pdcluster_worker.errors import ConfigError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank

_WEIGHT = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")
_PLAIN = ("F32", "F16", "BF16", "F8_E4M3")  # weights of other dtypes have another shape
_MAX_HEADER = 100_000_000  # bytes, the limit of safetensors
_UNREADABLE = (OSError, LookupError, ValueError, TypeError, AttributeError, struct.error)

Shapes = Mapping[str, tuple[int, ...]]


def check_adapters(config: WorkerConfig) -> None:
    """Raises ConfigError naming the adapter, both values and the fix.

    A folder that is in the engine's container alone is left to the engine.
    """
    vllm, model = config.engine.vllm, config.model
    folders = {name: Path(path) for name, path in vllm.adapters.items() if Path(path).is_dir()}
    shapes = _model_shapes(Path(model.path)) if folders else {}
    for name, folder in folders.items():
        try:
            settings = json.loads((folder / "adapter_config.json").read_bytes())
            lora = _lora_shapes(folder)
            rank = _rank(settings)
        except _UNREADABLE as e:
            raise ConfigError(
                f"adapter {name}: {folder} is no folder of a LoRA adapter of PEFT: {e}; give one, "
                "with adapter_config.json and adapter_model.safetensors"
            ) from e
        if rank > vllm.max_lora_rank:
            raise ConfigError(
                f"adapter {name} has rank {rank}, and {_limit(vllm.max_lora_rank, rank)}"
            )
        if misfit := _misfit(lora, shapes):
            base = settings.get("base_model_name_or_path") or "another model"
            raise ConfigError(
                f"adapter {name} is of {base}, and not of {model.name}: {misfit}; give an adapter "
                "of this model, or leave it out of model.adapters"
            )


def _rank(settings: dict[str, Any]) -> int:
    return max(int(settings["r"]), *map(int, (settings.get("rank_pattern") or {}).values()), 0)


def _limit(most: int, rank: int) -> str:
    enough = next((each for each in RANKS if each >= rank), None)
    fix = "give one of a lower rank" if enough is None else f"set --max-lora-rank {enough} there"
    return f"engine.args take at most {most} (--max-lora-rank): {fix}"


def _misfit(lora: Shapes, model: Shapes) -> str:
    """The first module that the model lacks, or has in another size; empty = all fit."""
    modules = {part for name in model for part in name.split(".")}
    for name, shape in lora.items():
        if (found := _WEIGHT.fullmatch(name)) is None:
            continue
        module, part = found.groups()
        module = module.removesuffix(".base_layer")  # of experts, where PEFT wraps one twice
        last = module.rpartition(".")[2]
        weight = model.get(f"{module}.weight")
        if weight is None and model and last not in modules:
            return f"it changes {last}, which the model lacks"
        what, side = ("inputs", 1) if part == "A" else ("outputs", 0)
        if weight is not None and len(weight) == len(shape) == 2 and weight[side] != shape[side]:
            sizes = f"{shape[side]} {what}, and in the model {weight[side]}"
            return f"{module} has {sizes}"
    return ""


def _lora_shapes(folder: Path) -> Shapes:
    """Empty for files of torch.save, which the engine alone reads."""
    weights = folder / "adapter_model.safetensors"
    others = (weights.with_suffix(suffix) for suffix in (".bin", ".pt"))
    if not weights.exists() and any(each.is_file() for each in others):
        return {}
    return _shapes(weights)


def _model_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Empty where the weights are not in safetensors files that can be read."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for path in folder.glob("*.safetensors"):
            shapes |= _shapes(path)
    except _UNREADABLE:
        return {}
    return shapes


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes in a safetensors file, by name; those of packed weights are empty."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER:
            raise ValueError(f"{path.name} is no safetensors file")
        header = json.loads(file.read(length))
    return {
        name: tuple(entry["shape"]) if entry["dtype"] in _PLAIN else ()
        for name, entry in header.items()
        if name != "__metadata__"
    }
