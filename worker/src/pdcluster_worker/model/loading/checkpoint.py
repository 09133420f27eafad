"""The weights of a model that our decoder runs, by name from its safetensors files.

Tensors stay mapped until they are packed.  Missing or wrong weights raise UnsupportedArchError;
additional ones are ignored, as transformers does.
"""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.loading.architecture import Architecture
from pdcluster_worker.model.loading.experts import in_halves
from pdcluster_worker.model.loading.quantization import Precision, WeightScheme
from pdcluster_worker.model.loading.stored_weights import (
    PARTS,
    PRECISIONS,
    StoredStack,
    StoredWeight,
    stored_weight,
)
from pdcluster_worker.model.loading.support import UnsupportedArchError
from pdcluster_worker.model.ops.adapters import Adapter
from pdcluster_worker.model.ops.quantized_weight import Weight, quantize_rows

_WEIGHT, _LAYERS = ".weight", "model.layers."
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True, slots=True)
class Linear:
    """weight: [N, K], in the file's dtype or quantized; bias: [N] or None."""

    weight: Weight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    architecture: Architecture
    dtype: torch.dtype
    tensors: Mapping[str, Tensor]  # by name, in the files' dtypes; none of `quantized`
    quantized: Mapping[str, StoredWeight]  # by the name of the linear layer
    stacks: Mapping[str, StoredStack]  # experts in MXFP4
    adapters: tuple[Adapter, ...] = ()
    quantization: Precision | None = None  # in which weights of layers are read; None = their own

    def linear(self, name: str) -> Linear:
        """Raises ModelError for quantized weights that are not finite."""
        bias = self.tensors.get(f"{name}.bias")
        if name in self.quantized:
            return Linear(self.quantized[name].read(), bias)
        return Linear(self._weight(name, self.tensors[f"{name}.weight"]), bias)

    def expert(self, path: str, index: int) -> tuple[list[Linear], Linear]:
        """Gate and up, in one or two products, and down.  path: of the layer.

        Raises ModelError for quantized weights that are not finite.
        """
        assert self.architecture.mixture is not None, "the layer has experts"
        names = self.architecture.mixture.names
        each = f"{path}.{names.each}"
        if names.is_stacked:
            gate_up = self._of_stack(f"{each}.gate_up_proj", index, has_turns=True)
            return [gate_up], self._of_stack(f"{each}.down_proj", index)
        gate, up, down = (
            self.linear(f"{each}.{index}.{name}") for name in (names.gate, names.up, names.down)
        )
        return [gate, up], down

    def _of_stack(self, name: str, index: int, *, has_turns: bool = False) -> Linear:
        bias = self.tensors[f"{name}_bias"][index]
        bias = in_halves(bias) if has_turns else bias
        if name in self.stacks:
            return Linear(self.stacks[name].read(index), bias)
        weight = self.tensors[name][index].T
        return Linear(self._weight(name, in_halves(weight) if has_turns else weight), bias)

    def _weight(self, name: str, weight: Tensor) -> Weight:
        if self.quantization is None or not self._is_quantizable(name):
            return weight
        quantized = quantize_rows(weight, PRECISIONS[self.quantization])
        if not quantized.scales.isfinite().all():
            raise ModelError(f"{name} has weights that are not finite: copy the model again")
        return quantized

    def _is_quantizable(self, name: str) -> bool:
        mixture = self.architecture.mixture
        is_router = mixture is not None and name.endswith(mixture.names.router)
        return name.startswith(_LAYERS) and not is_router

    def shape(self, name: str) -> Sequence[int]:
        """Outputs and inputs of a linear layer."""
        stored = self.quantized.get(name)
        return self.tensors[f"{name}.weight"].shape if stored is None else stored.shape

    @property
    def head(self) -> Linear:
        return self.linear((EMBEDDING if self.architecture.is_tied else HEAD).removesuffix(_WEIGHT))

    @property
    def precision(self) -> str:
        """Dtype of the weights of products: that of computation, or int8 or fp8_e4m3."""
        if self.quantization is not None:
            return self.quantization
        found = sorted({each.scheme.precision for each in self._stored})
        return " and ".join(found) or str(self.dtype).removeprefix("torch.")

    @property
    def num_bytes(self) -> int:
        own = sum(each.num_bytes for each in self._stored)
        return sum(map(self._bytes_of, self.tensors)) + own

    @property
    def _stored(self) -> Sequence[StoredWeight | StoredStack]:
        return [*self.quantized.values(), *self.stacks.values()]

    def _bytes_of(self, name: str) -> int:
        tensor = self.tensors[name]
        is_product = tensor.dim() > 1 and not name.endswith("bias")
        if (
            self.quantization is None
            or not is_product
            or not self._is_quantizable(name.removesuffix(_WEIGHT))
        ):
            return tensor.numel() * self.dtype.itemsize
        depth = tensor.shape[1]  # of a stack too, which is turned
        return tensor.numel() + 4 * (tensor.numel() // depth)


def open_checkpoint(
    folder: Path,
    architecture: Architecture,
    dtype: torch.dtype,
    schemes: Sequence[WeightScheme] = (),
) -> Checkpoint:
    """Raises UnsupportedArchError, and ModelError for malformed files."""
    mxfp4 = next((scheme for scheme in schemes if scheme.precision == "mxfp4"), None)
    shapes = expected_shapes(architecture, is_mxfp4=mxfp4 is not None)
    tensors = _read(folder, shapes.keys() | {HEAD} | set(_parts(shapes, schemes)))
    head = tensors.pop(HEAD, None) if HEAD not in shapes else None
    quantized = {}
    for name, (rows, columns) in _linears(shapes):
        parts = {part: tensors[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in tensors}
        stored = stored_weight(name, parts, schemes, (rows, columns))
        if stored is not None:
            quantized[name] = stored
            del shapes[f"{name}{_WEIGHT}"]
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise UnsupportedArchError(f"its files lack weights: {', '.join(missing[:3])}")
    stacks = {} if mxfp4 is None else _stacks(tensors, shapes, mxfp4)
    for name, shape in shapes.items():
        kind = tensors[name].dtype
        if tensors[name].shape != shape or not kind.is_floating_point or kind.itemsize < 2:
            given = f"{kind} {[*tensors[name].shape]}"
            raise UnsupportedArchError(
                f"{name} is {given}, not {[*shape]} numbers of 16 or 32 bits"
            )
    if head is not None and not torch.equal(head, tensors[EMBEDDING]):
        raise UnsupportedArchError(f"{HEAD} differs from the embedding that it is tied to")
    dense = {name: tensors[name] for name in shapes}
    return Checkpoint(architecture, dtype, dense, quantized, stacks)


def _stacks(
    tensors: Mapping[str, Tensor], shapes: dict[str, tuple[int, ...]], scheme: WeightScheme
) -> dict[str, StoredStack]:
    """Experts in MXFP4, whose tensors are taken out of `shapes`.  Raises UnsupportedArchError."""
    stacks = {}
    for blocks in [name for name in shapes if name.endswith("_blocks")]:
        name = blocks.removesuffix("_blocks")
        found, scales = tensors[blocks], tensors[f"{name}_scales"]
        sizes = shapes.pop(blocks), shapes.pop(f"{name}_scales")
        if {found.dtype, scales.dtype} != {torch.uint8} or (found.shape, scales.shape) != sizes:
            given = f"{found.dtype} {[*found.shape]} and {scales.dtype} {[*scales.shape]}"
            raise UnsupportedArchError(
                f"{name} is {given}, not bytes {[*sizes[0]]} and {[*sizes[1]]}"
            )
        has_turns = name.endswith("gate_up_proj")
        stacks[name] = StoredStack(name, scheme, found, scales, has_turns)
    if not stacks:
        raise UnsupportedArchError(
            "quant_method is mxfp4, and the model has no experts in one tensor"
        )
    return stacks


def _read(folder: Path, names: Set[str]) -> dict[str, Tensor]:
    tensors = {}
    try:
        for file in _files(folder):
            with safe_open(file, framework="pt") as opened:
                for name in names & set(opened.keys()):
                    tensors[name] = opened.get_tensor(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as e:
        raise ModelError(f"cannot load weights of {folder}: {type(e).__name__}: {e}") from e
    return tensors


def _linears(shapes: Mapping[str, Sequence[int]]) -> list[tuple[str, Sequence[int]]]:
    """Names and shapes of the linear layers."""
    return [
        (name.removesuffix(_WEIGHT), shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and name != EMBEDDING and name.endswith(_WEIGHT)
    ]


def _parts(shapes: Mapping[str, Sequence[int]], schemes: Sequence[WeightScheme]) -> Iterator[str]:
    for name, _ in _linears(shapes) if schemes else ():
        yield from (f"{name}.{part}" for part in PARTS)


def expected_shapes(
    architecture: Architecture, *, is_mxfp4: bool = False
) -> dict[str, tuple[int, ...]]:
    shape, width = architecture.attention, architecture.hidden_size
    inner = architecture.intermediate_size
    query, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    qkv, out, mlp = (
        architecture.has_qkv_bias,
        architecture.has_out_bias,
        architecture.has_mlp_bias,
    )
    attention = {
        "self_attn.q_proj": (query, width, qkv),
        "self_attn.k_proj": (keys, width, qkv),
        "self_attn.v_proj": (keys, width, qkv),
        "self_attn.o_proj": (width, query, out),
    }
    dense = {
        "mlp.gate_proj": (inner, width, mlp),
        "mlp.up_proj": (inner, width, mlp),
        "mlp.down_proj": (width, inner, mlp),
    }
    norms = {"input_layernorm": width, "post_attention_layernorm": width}
    if architecture.family.head_norms:
        norms |= {"self_attn.q_norm": shape.head_dim, "self_attn.k_norm": shape.head_dim}
    sinks = {"self_attn.sinks": (shape.num_heads,)} if architecture.family.has_sinks else {}
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (architecture.vocab_size, width),
        NORM: (width,),
    }
    if not architecture.is_tied:
        shapes[HEAD] = (architecture.vocab_size, width)
    for layer in range(architecture.num_layers):
        path = f"model.layers.{layer}"
        mixture = architecture.mixture if architecture.is_mixed(layer) else None
        products = attention | dense if mixture is None else attention
        for name, (rows, columns, has_bias) in products.items():
            shapes[f"{path}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{path}.{name}.bias"] = (rows,)
        shapes |= {f"{path}.{name}.weight": (size,) for name, size in norms.items()}
        shapes |= {f"{path}.{name}": size for name, size in sinks.items()}
        if mixture is not None:
            shapes |= mixture.shapes(path, width, is_mxfp4=is_mxfp4)
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
