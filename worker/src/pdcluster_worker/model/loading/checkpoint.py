"""The weights of a model that our decoder runs, by name from its safetensors files.

Tensors stay mapped until they are packed.  Missing or wrong weights raise UnsupportedArchError;
additional ones are ignored, as transformers does.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.loading.architecture import Architecture
from pdcluster_worker.model.loading.support import UnsupportedArchError
from pdcluster_worker.model.ops.adapters import Adapter

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True, slots=True)
class Linear:
    """weight: [N, K], in the file's dtype; bias: [N] or None."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    architecture: Architecture
    dtype: torch.dtype
    tensors: Mapping[str, Tensor]  # by name, in the files' dtypes
    adapters: tuple[Adapter, ...] = ()

    def linear(self, name: str) -> Linear:
        return Linear(self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    @property
    def head(self) -> Linear:
        name = EMBEDDING if self.architecture.is_tied else HEAD
        return Linear(self.tensors[name], None)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values()) * self.dtype.itemsize


def open_checkpoint(folder: Path, architecture: Architecture, dtype: torch.dtype) -> Checkpoint:
    """Raises UnsupportedArchError, and ModelError for malformed files."""
    shapes = expected_shapes(architecture)
    tensors: dict[str, Tensor] = {}
    head = None
    try:
        for file in _files(folder):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    if name in shapes:
                        tensors[name] = opened.get_tensor(name)
                    elif name == HEAD:
                        head = opened.get_tensor(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as e:
        raise ModelError(f"cannot load weights of {folder}: {type(e).__name__}: {e}") from e
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise UnsupportedArchError(f"its files lack weights: {', '.join(missing[:3])}")
    for name, shape in shapes.items():
        if tensors[name].shape != shape or not tensors[name].is_floating_point():
            raise UnsupportedArchError(
                f"{name} is {tensors[name].dtype} {[*tensors[name].shape]}, not {[*shape]} numbers"
            )
    if head is not None and not torch.equal(head, tensors[EMBEDDING]):
        raise UnsupportedArchError(f"{HEAD} differs from the embedding that it is tied to")
    return Checkpoint(architecture, dtype, {name: tensors[name] for name in shapes})


def expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    shape, width = architecture.attention, architecture.hidden_size
    inner = architecture.intermediate_size
    query, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    qkv, out, mlp = (
        architecture.has_qkv_bias,
        architecture.has_out_bias,
        architecture.has_mlp_bias,
    )
    products = {
        "self_attn.q_proj": (query, width, qkv),
        "self_attn.k_proj": (keys, width, qkv),
        "self_attn.v_proj": (keys, width, qkv),
        "self_attn.o_proj": (width, query, out),
        "mlp.gate_proj": (inner, width, mlp),
        "mlp.up_proj": (inner, width, mlp),
        "mlp.down_proj": (width, inner, mlp),
    }
    norms = {"input_layernorm": width, "post_attention_layernorm": width}
    if architecture.family.head_norms:
        norms |= {"self_attn.q_norm": shape.head_dim, "self_attn.k_norm": shape.head_dim}
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (architecture.vocab_size, width),
        NORM: (width,),
    }
    if not architecture.is_tied:
        shapes[HEAD] = (architecture.vocab_size, width)
    for layer in range(architecture.num_layers):
        path = f"model.layers.{layer}"
        for name, (rows, columns, has_bias) in products.items():
            shapes[f"{path}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{path}.{name}.bias"] = (rows,)
        shapes |= {f"{path}.{name}.weight": (size,) for name, size in norms.items()}
    return shapes


def _files(folder: Path) -> list[Path]:
    """The files that transformers reads.  Raises UnsupportedArchError without any."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    if index.exists():
        names = json.loads(index.read_bytes())["weight_map"].values()
        return sorted({folder / name for name in names})
    raise UnsupportedArchError("its weights are not in safetensors files")
