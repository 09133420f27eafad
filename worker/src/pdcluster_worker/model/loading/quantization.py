"""Schemes of quantized weights, by `quantization_config` of config.json: the formats of
compressed-tensors with 8 bits, and FP8 with scales of blocks.  No torch here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pdcluster_worker.errors import ModelError

Precision = Literal["int8", "fp8_e4m3"]

_COMPRESSED, _FP8 = "compressed-tensors", "fp8"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_WAY_OUT = (
    "our own engine reads int8 weights alone and FP8 weights, of compressed-tensors or "
    "quant_method fp8: take such a checkpoint or one in 16 bits, or set engine.type: vllm"
)


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """block: rows and columns that share a scale, 0 = all."""

    precision: Precision
    block: tuple[int, int]
    is_packed: bool = False  # four codes in an int32
    scale: str = "weight_scale"  # name of the tensor, beside `weight`
    targets: tuple[str, ...] = ("Linear",)

    def is_for(self, module: str) -> bool:
        """Return whether it is that of a linear layer of this name."""
        return any(
            re.match(target[3:], module) is not None
            if target.startswith("re:")
            else target in ("Linear", module)
            for target in self.targets
        )


def read_schemes(config: Mapping[str, Any]) -> tuple[WeightScheme, ...]:
    """Empty for weights that are not quantized.  Raises ModelError for what we cannot read."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return ()
    try:
        schemes, reasons = _read(given)
    except (AttributeError, TypeError, ValueError) as e:
        schemes, reasons = (), [f"cannot be read: {type(e).__name__}: {e}"]
    if reasons:
        raise ModelError(f"quantization_config: {'; '.join(reasons)}: {_WAY_OUT}")
    return schemes


def _read(given: Mapping[str, Any]) -> tuple[tuple[WeightScheme, ...], list[str]]:
    method = given.get("quant_method")
    if method == _FP8:
        return (_block_fp8(given),), list(_fp8_reasons(given))
    if method != _COMPRESSED:
        return (), [f"quant_method is {method}"]
    groups = list(given["config_groups"].values()) if given.get("config_groups") else []
    reasons = [*_compressed_reasons(given, groups)]
    if reasons:
        return (), reasons
    return tuple(_scheme(group, given) for group in groups), reasons


def _block_fp8(given: Mapping[str, Any]) -> WeightScheme:
    rows, columns = given.get("weight_block_size") or (0, 0)
    return WeightScheme("fp8_e4m3", (int(rows), int(columns)), scale="weight_scale_inv")


def _fp8_reasons(given: Mapping[str, Any]) -> Iterator[str]:
    for name, known in (
        ("activation_scheme", ("dynamic",)),
        ("scale_fmt", ("float",)),
        ("fmt", ("e4m3",)),
    ):
        if given.get(name) not in (None, *known):
            yield f"{name} is {given[name]}, not {known[0]}"
    if given.get("modules_to_convert"):
        yield "modules_to_convert has modules beside the linear layers"


def _compressed_reasons(
    given: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    if not groups:
        yield "config_groups is empty"
    for name in ("kv_cache_scheme", "transform_config"):
        if given.get(name):
            yield f"{name} is set"
    sparsity = given.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        yield f"sparsity_config.format is {sparsity['format']}, not dense"
    for group in groups:
        yield from _group_reasons(group, str(group.get("format") or given.get("format")))


def _group_reasons(group: Mapping[str, Any], form: str) -> Iterator[str]:
    if form not in FORMATS:
        yield f"format is {form}, not one of {', '.join(FORMATS)}"
    weights = group.get("weights") or {}
    kind = weights.get("type", "int")
    if weights.get("num_bits") != 8 or kind not in ("int", "float"):
        yield f"weights have {weights.get('num_bits')} bits of type {kind}, not 8 of int or float"
    if form == "pack-quantized" and kind != "int":
        yield f"weights of format {form} are of type {kind}, not int"
    if weights.get("symmetric") is False:
        yield "weights.symmetric is false"
    if weights.get("dynamic"):
        yield "weights.dynamic is set"
    if weights.get("actorder") == "group":
        yield "weights.actorder is group"
    if weights.get("strategy") not in ("tensor", "channel", "group", "block"):
        yield f"weights.strategy is {weights.get('strategy')}"
    size = {"group": "group_size", "block": "block_structure"}.get(str(weights.get("strategy")))
    if size is not None and not weights.get(size):
        yield f"weights.{size} is missing"
    if group.get("output_activations"):
        yield "output_activations are quantized"
    inputs = group.get("input_activations") or {}
    if inputs and not (kind == "float" and inputs.get("type") == "float" and inputs["dynamic"]):
        how = "dynamic" if inputs.get("dynamic") else "static"
        yield (
            f"input_activations are quantized to {how} {inputs.get('type', 'int')}"
            f"{inputs.get('num_bits')}, and the engine computes with activations as they are"
        )


def _scheme(group: Mapping[str, Any], given: Mapping[str, Any]) -> WeightScheme:
    weights = group["weights"]
    rows, columns = {
        "tensor": (0, 0),
        "channel": (1, 0),
        "group": (1, weights.get("group_size")),
        "block": weights.get("block_structure"),
    }[weights["strategy"]]
    return WeightScheme(
        "int8" if weights.get("type", "int") == "int" else "fp8_e4m3",
        (int(rows), int(columns)),
        is_packed=(group.get("format") or given.get("format")) == "pack-quantized",
        targets=tuple(group.get("targets") or ("Linear",)),
    )
