"""Schemes of quantized weights, by `quantization_config` of config.json: the formats of
compressed-tensors with 8 bits, and FP8 with scales of blocks.  No torch here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pdcluster_worker.errors import ModelError

Precision = Literal["int8", "fp8_e4m3", "mxfp4"]

_COMPRESSED, _FP8, _MXFP4 = "compressed-tensors", "fp8", "mxfp4"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_WAY_OUT = (
    "our own engine reads int8 weights alone and FP8 weights, of compressed-tensors or "
    "quant_method fp8, and gpt-oss's mxfp4: take such a checkpoint or one in 16 bits, or set "
    "engine.type: vllm"
)


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """block: rows and columns that share a scale, 0 = all."""

    precision: Precision
    block: tuple[int, int]
    is_packed: bool = False  # four codes in an int32
    scale: str = "weight_scale"  # name of the tensor, beside `weight`
    targets: tuple[str, ...] = ("Linear",)

    def fit(self, module: str) -> int:
        """Return 3 where it names a linear layer, 2 by a pattern, 1 by its class, else 0."""
        return max((_fit(target, module) for target in self.targets), default=0)


def _fit(target: str, module: str) -> int:
    if target.startswith("re:"):
        return 2 if re.match(target[3:], module) else 0
    return {module: 3, "Linear": 1}.get(target, 0)


def scheme_of(module: str, schemes: Sequence[WeightScheme]) -> WeightScheme | None:
    """That which names a linear layer most closely, as compressed-tensors chooses it."""
    scheme = max(schemes, key=lambda each: each.fit(module), default=None)
    return scheme if scheme is not None and scheme.fit(module) else None


def read_schemes(config: Mapping[str, Any]) -> tuple[WeightScheme, ...]:
    """Empty for weights that are not quantized.  Raises ModelError for what we cannot read."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return ()
    try:
        schemes, reasons = _read(given)
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        schemes, reasons = (), [f"cannot be read: {type(e).__name__}: {e}"]
    if reasons:
        raise ModelError(f"quantization_config: {'; '.join(reasons)}: {_WAY_OUT}")
    return schemes


def _read(given: Mapping[str, Any]) -> tuple[tuple[WeightScheme, ...], list[str]]:
    method = given.get("quant_method")
    if method == _FP8:
        reasons = [*_fp8_reasons(given)]
        return () if reasons else (_block_fp8(given),), reasons
    if method == _MXFP4:
        return (WeightScheme("mxfp4", (1, 32), targets=()),), []
    if method != _COMPRESSED:
        return (), [f"quant_method is {method}"]
    groups = list(given["config_groups"].values()) if given.get("config_groups") else []
    reasons = [*_compressed_reasons(given, groups)]
    if reasons:
        return (), reasons
    return tuple(_scheme(group, given) for group in groups), reasons


def _block_fp8(given: Mapping[str, Any]) -> WeightScheme:
    rows, columns = given.get("weight_block_size") or (0, 0)
    return WeightScheme("fp8_e4m3", (rows, columns), scale="weight_scale_inv")


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
    block = given.get("weight_block_size")
    if block is not None and not _are_sizes(block, 2):
        yield f"weight_block_size is {block}, not [rows, columns] above 0"


def _are_sizes(given: Any, count: int) -> bool:
    is_list = isinstance(given, list) and len(given) == count
    return is_list and all(type(size) is int and size > 0 for size in given)


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
    yield from _scale_reasons(weights)
    yield from _target_reasons(group.get("targets") or [])
    if group.get("output_activations"):
        yield "output_activations are quantized"
    yield from _input_reasons(group.get("input_activations") or {}, kind)


def _target_reasons(targets: Any) -> Iterator[str]:
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        yield f"targets is {targets}, not a list of names and patterns"
        return
    for target in targets:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error as e:
            yield f"targets has {target}, which is no pattern: {e}"


def _scale_reasons(weights: Mapping[str, Any]) -> Iterator[str]:
    strategy, columns = weights.get("strategy"), weights.get("group_size")
    block = weights.get("block_structure")
    if strategy not in ("tensor", "channel", "group", "block"):
        yield f"weights.strategy is {strategy}"
    if strategy == "group" and not _are_sizes([columns], 1):
        yield f"weights.group_size is {columns}, not a number of columns above 0"
    if strategy == "block" and not _are_sizes(block, 2):
        yield f"weights.block_structure is {block}, not [rows, columns] above 0"


def _input_reasons(inputs: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Those that FP8 weights may leave out: each input scaled by itself, to FP8."""
    left_out = {"type": "float", "num_bits": 8, "dynamic": True}
    if inputs and not (kind == "float" and left_out.items() <= {**inputs}.items()):
        given = inputs.get("dynamic") or "static"
        how = "dynamic" if given is True else given
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
        (rows, columns),
        is_packed=(group.get("format") or given.get("format")) == "pack-quantized",
        targets=tuple(group.get("targets") or ("Linear",)),
    )
