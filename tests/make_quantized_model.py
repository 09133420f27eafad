"""Write a model folder again with quantized weights, as published checkpoints have them, or with
the same weights dequantized: `make_quantized_model.py KIND FOLDER TARGET`.

KIND is one of KINDS: a format of compressed-tensors and how its scales lie, or `fp8-blocks` as
DeepSeek and Qwen publish it.  Norms, embedding and head stay as they are.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pdcluster_worker.model.ops.quantized_weight import QuantizedWeight

TOPS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True)
class Kind:
    """block: rows and columns of a scale, 0 = all; format: of compressed-tensors, else of FP8."""

    codes: torch.dtype
    block: tuple[int, int]
    strategy: str
    format: str | None = None


KINDS = {
    "int8-channel": Kind(torch.int8, (1, 0), "channel", "int-quantized"),
    "int8-packed": Kind(torch.int8, (1, 0), "channel", "pack-quantized"),
    "int8-groups": Kind(torch.int8, (1, 32), "group", "pack-quantized"),
    "fp8-channel": Kind(torch.float8_e4m3fn, (1, 0), "channel", "float-quantized"),
    "fp8-tensor": Kind(torch.float8_e4m3fn, (0, 0), "tensor", "float-quantized"),
    "fp8-blocks": Kind(torch.float8_e4m3fn, (32, 32), "block"),
}


def scales_of(weight: torch.Tensor, codes: torch.dtype, block: tuple[int, int]) -> torch.Tensor:
    """The greatest of each block over the greatest code: [blocks of rows, blocks of columns]."""
    rows, columns = (size or whole for size, whole in zip(block, weight.shape, strict=True))
    parts = [[piece.abs().max() for piece in band.split(columns, 1)] for band in weight.split(rows)]
    return torch.tensor(parts).clamp(min=1e-8) / TOPS[codes]


def quantized(
    weight: torch.Tensor, codes: torch.dtype, block: tuple[int, int], dtype: Any = torch.float32
) -> QuantizedWeight:
    """Rounded to the nearest.  dtype: of the scales as they are stored."""
    rows, columns = (size or whole for size, whole in zip(block, weight.shape, strict=True))
    scales = scales_of(weight.float(), codes, block).to(dtype).float()
    scales = scales.repeat_interleave(rows, 0)[: len(weight)]
    exact = weight.float() / scales.repeat_interleave(columns, 1)[:, : weight.shape[1]]
    exact = exact.clamp(-TOPS[codes], TOPS[codes])
    bits = (exact.round() if codes == torch.int8 else exact).to(codes).view(torch.int8)
    return QuantizedWeight(bits, scales, columns, codes)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Four in an int32, the first in its lowest byte, each with 128 added."""
    padded = torch.nn.functional.pad(codes.int() + 128, (0, -codes.shape[1] % 4))
    words = (padded.view(len(codes), -1, 4).long() << torch.tensor([0, 8, 16, 24])).sum(2)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


def layer_tensors(name: str, weight: torch.Tensor, kind: Kind) -> dict[str, torch.Tensor]:
    dtype = torch.bfloat16 if kind.format else torch.float32
    found = quantized(weight, kind.codes, kind.block, dtype)
    grid = scales_of(weight.float(), kind.codes, kind.block).to(dtype)
    if kind.format == "pack-quantized":
        shape = torch.tensor(weight.shape)
        codes = {"weight_packed": packed(found.codes), "weight_shape": shape}
    else:
        codes = {"weight": found.codes.view(kind.codes).contiguous()}
    scale = "weight_scale" if kind.format else "weight_scale_inv"
    codes[scale] = grid.flatten() if kind.strategy == "tensor" else grid
    return {f"{name}.{part}": tensor for part, tensor in codes.items()}


def settings(kind: Kind) -> dict[str, Any]:
    """`quantization_config`, with what our loader does not read left out."""
    if kind.format is None:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": list(kind.block),
        }
    is_int = kind.codes == torch.int8
    inputs = {"dynamic": True, "num_bits": 8, "strategy": "token", "type": "float"}
    weights = {
        "num_bits": 8,
        "type": "int" if is_int else "float",
        "strategy": kind.strategy,
        "group_size": kind.block[1] or None,
        "symmetric": True,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
    }
    group = {"targets": ["Linear"], "weights": weights, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind.format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {**group, "input_activations": None if is_int else inputs}},
    }


def make_quantized_model(name: str, folder: Path, target: Path, *, dense: bool = False) -> Path:
    """Write the folder `target`, and return it.  dense: with the same weights dequantized."""
    kind = KINDS[name]
    shutil.copytree(folder, target)
    tensors: dict[str, torch.Tensor] = {}
    for each, tensor in load_file(folder / "model.safetensors").items():
        if not each.endswith("_proj.weight"):
            tensors[each] = tensor
        elif dense:
            dtype = torch.bfloat16 if kind.format else torch.float32
            tensors[each] = quantized(tensor, kind.codes, kind.block, dtype).dense(torch.float32)
        else:
            tensors |= layer_tensors(each.removesuffix(".weight"), tensor, kind)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    if not dense:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = settings(kind)
        (target / "config.json").write_text(json.dumps(config))
    return target


if __name__ == "__main__":
    make_quantized_model(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
