"""Reads LoRA adapters, folders of PEFT, for our decoder; refuses what it would compute wrongly."""

import hashlib
import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pdcluster_worker.config.worker import RuntimeAdaptersConfig
from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.loading.architecture import Architecture
from pdcluster_worker.model.loading.checkpoint import Checkpoint, expected_shapes
from pdcluster_worker.model.loading.loader import LoadedModel
from pdcluster_worker.model.ops.adapters import Adapter, LowRank

logger = logging.getLogger(__name__)

MAX_RANK = 512
"""The largest that vLLM takes too; from about there on, merged weights are smaller."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_WEIGHT = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")

_FIX = "give an adapter without it, or merge it into a model of its own"

_REFUSED = (
    *("use_dora", "modules_to_save", "lora_bias", "alpha_pattern", "target_parameters"),
    *("trainable_token_indices", "alora_invocation_tokens", "use_qalora", "layer_replication"),
)
"""Settings of PEFT with which the weights of A and B are not all of an adapter."""

_TAKES_FROM_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` with which A and B start as a part of the model's weights, and
the model is what is left of them; one that PEFT saved converted has True there.
"""


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """The model that adapters are for.  shapes: of its weights, by name."""

    architecture: Architecture
    dtype: torch.dtype
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "AdapterTarget":
        architecture = checkpoint.architecture
        return cls(architecture, checkpoint.dtype, expected_shapes(architecture))


def with_adapters(
    loaded: LoadedModel, folders: Mapping[str, str], later: RuntimeAdaptersConfig | None = None
) -> LoadedModel:
    """The model with its adapters, whose fingerprints are part of its own, and the room that others
    have.  Raises ModelError.

    folders: of the adapters, by name.
    """
    if not folders and later is None:
        return loaded
    checkpoint = loaded.checkpoint
    if checkpoint is None:
        field = "model.adapters" if folders else "model.runtimeAdapters"
        raise ModelError(
            f"{field} needs our own decoder: {loaded.reason}; leave it out, or set "
            "engine.type: vllm"
        )
    if later is not None:
        loaded = replace(
            loaded,
            weight_bytes=loaded.weight_bytes + later.memory,
            adapter_bytes=later.memory,
        )
    if not folders:
        return loaded
    target = AdapterTarget.of(checkpoint)
    adapters = [
        open_adapter(name, Path(path).expanduser(), target) for name, path in folders.items()
    ]
    num_bytes = sum(each.num_elements for each in adapters) * checkpoint.dtype.itemsize
    digest = hashlib.sha256(loaded.info.weights.encode())
    for each in sorted(adapters, key=lambda adapter: adapter.name):
        digest.update(f"\n{each.name}\n{each.fingerprint}".encode())
        logger.info("loaded adapter name=%s projections=%d", each.name, len(each.parts))
    names = tuple(each.name for each in adapters)
    return replace(
        loaded,
        info=replace(loaded.info, weights=digest.hexdigest(), adapters=names),
        weight_bytes=loaded.weight_bytes + num_bytes,
        adapter_bytes=loaded.adapter_bytes + num_bytes,
        checkpoint=replace(checkpoint, adapters=tuple(adapters)),
    )


def open_adapter(given_name: str, folder: Path, target: AdapterTarget) -> Adapter:
    """Raises ModelError, which names the adapter, the limit and the fix."""
    name = f"adapter {given_name}"
    try:
        settings = json.loads((folder / CONFIG).read_bytes())
        # read whole: what is hashed is what is computed with, and the file may change
        content = (folder / WEIGHTS).read_bytes()
        digest = hashlib.sha256(content)
        tensors = safetensors.torch.load(content)
        rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
    except (OSError, ValueError, OverflowError, LookupError, TypeError, SafetensorError) as e:
        raise ModelError(
            f"{name}: {folder} is no folder of a LoRA adapter of PEFT: {e}; give one, with "
            f"{CONFIG} and {WEIGHTS}"
        ) from e
    _check_settings(name, settings)
    pairs = _pairs(name, tensors, target.shapes)
    patterned = bool(settings.get("rank_pattern"))
    parts: dict[str, LowRank] = {}
    for module, (a, b) in pairs.items():
        own = len(a)
        if own > MAX_RANK or own < 1:
            raise ModelError(
                f"{name} has rank {own} in {module}, and a rank is from 1 to {MAX_RANK}: give one "
                "of a lower rank, or merge it into a model of its own"
            )
        if own != rank and not patterned:
            raise ModelError(
                f"{name} has rank {own} in {module}, and r is {rank} in {CONFIG}: give the folder "
                "as PEFT saved it"
            )
        scale = alpha / (math.sqrt(own) if settings.get("use_rslora") else own)
        for half in (a, b):
            _check_finite(name, module, half.to(target.dtype))
        parts[module] = LowRank(a, b, scale)
    digest.update(f"{alpha} {bool(settings.get('use_rslora'))}".encode())
    return Adapter(given_name, parts, digest.hexdigest())


def _check_settings(name: str, settings: Mapping[str, Any]) -> None:
    kind = settings.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"{name} has peft_type {kind} in {CONFIG}, not LORA: {_FIX}")
    if settings.get("bias", "none") != "none":
        raise ModelError(f"{name} has bias {settings['bias']} in {CONFIG}, not none: {_FIX}")
    for field in _REFUSED:
        if settings.get(field):
            raise ModelError(f"{name} has {field} in {CONFIG}, which our engine lacks: {_FIX}")
    start = str(settings.get("init_lora_weights")).lower()
    if start.startswith(_TAKES_FROM_MODEL):
        raise ModelError(
            f"{name} has init_lora_weights {start} in {CONFIG}, so its weights are those of a "
            "changed model: save it with path_initial_model_for_weight_conversion, or merge it "
            "into a model of its own"
        )
    alpha = float(settings["lora_alpha"])
    if not math.isfinite(alpha):
        raise ModelError(
            f"{name}: lora_alpha is {alpha} in {CONFIG}, not a finite number: give the folder as "
            "PEFT saved it"
        )


def _check_finite(name: str, module: str, half: Tensor) -> None:
    if not half.isfinite().all():
        raise ModelError(
            f"{name}: {module} has a weight that is not finite in "
            f"{str(half.dtype).removeprefix('torch.')}: train it again, or leave it out"
        )


def _pairs(
    name: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each projection, checked against the model's sizes."""
    halves: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in sorted(tensors.items()):
        found = _WEIGHT.fullmatch(key)
        module = found[1] if found else key
        is_expert = ".experts." in module
        is_product = len(shapes.get(f"{module}.weight", ())) == 2 and "proj" in module
        if found is None or not is_product or is_expert:
            last = "experts" if is_expert else module.removesuffix(".weight").rpartition(".")[2]
            raise ModelError(
                f"{name} changes {last} ({key}), and our engine adapts {_PROJECTIONS} of this "
                f"model's {_num_layers(shapes)} layers: {_FIX}"
            )
        if found[2] in halves[module]:
            half = f"{module}.lora_{found[2]}.weight"
            raise ModelError(f"{name} has {half} twice: give the folder as PEFT saved it")
        halves[module][found[2]] = tensor
    if not halves:
        raise ModelError(f"{name} has no weights in {WEIGHTS}: give the folder as PEFT saved it")
    return {module: _checked(name, module, each, shapes) for module, each in halves.items()}


_PROJECTIONS = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj"


def _num_layers(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(name.endswith(".q_proj.weight") for name in shapes)


def _checked(
    name: str, module: str, halves: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Tensor, Tensor]:
    if missing := {"A", "B"} - halves.keys():
        raise ModelError(
            f"{name} lacks {module}.lora_{min(missing)}.weight: give the folder as PEFT saved it"
        )
    outputs, inputs = shapes[f"{module}.weight"]
    for half, size, side, what in _sides(halves, outputs, inputs):
        if half.ndim != 2 or not half.is_floating_point():
            raise ModelError(
                f"{name}: {module} is {half.dtype} {[*half.shape]}, not numbers in rows and "
                "columns: give the folder as PEFT saved it"
            )
        if half.shape[side] != size:
            raise ModelError(
                f"{name} is of another model: {module} has {half.shape[side]} {what}, and in the "
                f"model {size}; give an adapter of this model, or leave it out"
            )
    if len(halves["A"]) != halves["B"].shape[1]:
        raise ModelError(
            f"{name}: {module} has rank {len(halves['A'])} in lora_A and "
            f"{halves['B'].shape[1]} in lora_B: give the folder as PEFT saved it"
        )
    return halves["A"], halves["B"]


def _sides(
    halves: Mapping[str, Tensor], outputs: int, inputs: int
) -> Iterator[tuple[Tensor, int, int, str]]:
    yield halves["A"], inputs, 1, "inputs"
    yield halves["B"], outputs, 0, "outputs"
