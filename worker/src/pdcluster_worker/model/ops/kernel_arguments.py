"""Arguments of the C kernels (kernels/model.h, product.h, sample.c), and what they point at."""

import ctypes
import functools
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pdcluster_worker.model.memory import reserve_private
from pdcluster_worker.model.ops.adapter_arguments import AdaptedArguments, adapted_arguments
from pdcluster_worker.model.ops.experts import Experts
from pdcluster_worker.model.ops.operations import (
    Activation,
    AttentionShape,
    HeadNorms,
    Layer,
    Layers,
    Mlp,
    Norm,
    Rotation,
)
from pdcluster_worker.model.ops.quantized_weight import QuantizedWeight
from pdcluster_worker.model.ops.stored_kv import StoredKV
from pdcluster_worker.model.sampling.picking import Picks
from pdcluster_worker.model.sampling.rows import Rows
from pdcluster_worker.model.sampling.sampler import RowOperations, TokenRanks
from pdcluster_worker.model.step_plan import StepPlan

KINDS = {torch.bfloat16: 0, torch.float32: 1}  # numbers in the kernels
_STORED = KINDS | {torch.int8: 2, torch.float8_e4m3fn: 3}

ACTIVATIONS: dict[Activation, int] = {"gelu_tanh": 0, "silu": 1, "clamped_silu": 2}  # of rows.h

_NO_MEMORY = 3  # status of a sampled row

_STEP_BYTES = 64  # rows of x are read in pieces of this many bytes
_PAIR = 32  # columns that are packed side by side
_MAP_BYTES = 64 << 20
_CACHE_LINE_BYTES = 64


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, c_void_p) for name in names]


def _integers(*names: str) -> list[tuple[str, type]]:
    return [(name, c_int64) for name in names]


class ModelArguments(ctypes.Structure):
    _fields_: ClassVar = [
        *_pointers("cache"),
        *_integers("kind", "stored", "heads", "kv_heads", "dim", "block_size"),
        *_integers("block_bytes", "head_bytes", "half_bytes", "scales"),
        ("scaling", c_float),
    ]


class PlanArguments(ctypes.Structure):
    _fields_: ClassVar = [
        *_pointers("slots", "firsts", "lengths", "contexts", "seats", "tables"),
        *_pointers("adapter_rows", "adapter_runs"),
        *_integers("rows", "num_tokens", "num_sequences", "num_decodes", "table_width"),
        *_integers("num_runs"),
    ]


class RotationArguments(ctypes.Structure):
    _fields_: ClassVar = [*_pointers("cosine", "sine"), *_integers("half")]


class NormArguments(ctypes.Structure):
    _fields_: ClassVar = [*_pointers("weight"), ("epsilon", c_float), *_integers("rounds_first")]


class WeightsArguments(ctypes.Structure):
    _fields_: ClassVar = [
        *_pointers("tiles", "bias", "scales"),
        *_integers("kind", "stored", "columns", "depth", "group", "is_wide"),
    ]


class LayerArguments(ctypes.Structure):
    _fields_: ClassVar = [
        ("attention_norm", NormArguments),
        ("mlp_norm", NormArguments),
        *_pointers("qkv", "out", "gate_up", "down", "experts", "head_norms", "sinks", "adapted"),
        *_integers("rotates", "window"),
    ]


class ExpertsArguments(ctypes.Structure):
    _fields_: ClassVar = [
        *_pointers("router", "gate_up", "down"),
        *_integers("count", "chosen", "first", "own", "normalizes"),
    ]


class StackArguments(ctypes.Structure):
    _fields_: ClassVar = [
        *_pointers("layers"),
        *_integers("count", "width", "wide", "half", "activation"),
    ]


class SampleArguments(ctypes.Structure):
    _fields_: ClassVar = [
        *_pointers("logits"),
        *_integers("stride", "vocab_size"),
        *_pointers("inverse_temperature", "top_k", "top_p", "min_p", "u", "token_ids", "status"),
    ]


class RankArguments(ctypes.Structure):
    _fields_: ClassVar = [
        *_pointers("logits"),
        *_integers("stride", "vocab_size", "count"),
        *_pointers("rows", "ids", "best", "total"),
    ]


def model_arguments(cache: StoredKV, shape: AttentionShape) -> ModelArguments:
    """The cache must outlive the result."""
    rows, scales = cache.rows, cache.scales
    _, kv_heads, _, _, block_size, dim = rows.shape
    kinds = KINDS[cache.dtype], _STORED[rows.dtype]
    strides = (rows.stride(axis) * rows.element_size() for axis in (0, 1, 3))
    scales_at = 0 if scales is None else scales.data_ptr() - rows.data_ptr()
    return ModelArguments(
        *(rows.data_ptr(), *kinds, shape.num_heads, kv_heads, dim, block_size),
        *(*strides, scales_at, shape.scaling),
    )


def plan_arguments(plan: StepPlan) -> PlanArguments:
    """The plan's arrays must outlive the result."""
    arrays = (
        *(plan.slots, plan.firsts, plan.lengths, plan.contexts, plan.table_rows, plan.tables),
        *(plan.adapter_rows, plan.adapter_runs),
    )
    sizes = (
        len(plan.slots),
        plan.num_tokens,
        len(plan.firsts),
        plan.num_decodes,
        plan.tables.stride(0),
        len(plan.adapter_runs),
    )
    return PlanArguments(*(array.data_ptr() for array in arrays), *sizes)


def rotation_arguments(rotation: Rotation | None) -> RotationArguments:
    if rotation is None:
        return RotationArguments(None, None, 0)
    return RotationArguments(
        rotation.cosine.data_ptr(), rotation.sine.data_ptr(), rotation.cosine.shape[1]
    )


def head_norm_arguments(norms: HeadNorms) -> ctypes.Array[NormArguments]:
    """Queries' norm, then keys'."""
    return (NormArguments * 2)(
        *(NormArguments(*norm_fields(norm)) for norm in (norms.query, norms.key))
    )


def norm_fields(norm: Norm) -> tuple[int, float, int]:
    return norm.weight.data_ptr(), norm.epsilon, int(norm.rounds_first)


class HugePages:
    """Allocates from large maps, because a map smaller than a huge page has none."""

    def __init__(self, map_bytes: int = _MAP_BYTES) -> None:
        self._map = torch.empty(0, dtype=torch.uint8)
        self._map_bytes = map_bytes
        self._used_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, aligned to a cache line.  Raises ModelError."""
        if self._used_bytes + num_bytes > len(self._map):
            fix = "use a smaller model or a larger machine"
            memory = reserve_private("packed weights", max(num_bytes, self._map_bytes), fix)
            self._map, self._used_bytes = torch.frombuffer(memory, dtype=torch.uint8), 0
        piece = self._map[self._used_bytes : self._used_bytes + num_bytes]
        self._used_bytes += -(-num_bytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        return piece


@dataclass(frozen=True, slots=True)
class QuantizedColumns:
    """scales: [columns / 32, up][groups][32] float32."""

    scales: Tensor
    group: int
    kind: int  # of the codes


def quantized_columns(weight: QuantizedWeight, dtype: torch.dtype) -> QuantizedColumns | None:
    """Scales as the kernels read them; None where a group is not of whole steps of a row."""
    columns, depth = weight.shape
    if weight.group < depth and weight.group % (_STEP_BYTES // dtype.itemsize):
        return None
    scales = functional.pad(weight.scales, (0, 0, 0, -columns % _PAIR))
    scales = scales.view(-1, _PAIR, scales.shape[1]).transpose(1, 2).contiguous()
    return QuantizedColumns(scales, weight.group, _STORED[weight.dtype])


class PackedWeights:
    """Keeps the tensors that `arguments` points at.  quantized: None where they are as computed."""

    __slots__ = (
        *("address", "arguments", "bias", "columns", "depth", "dtype", "missing", "quantized"),
        "tiles",
    )

    def __init__(
        self,
        tiles: Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
        bias: Tensor | None,
        *,
        wide: bool,
        quantized: QuantizedColumns | None = None,
    ) -> None:
        self.tiles = tiles
        self.columns, self.depth = shape
        self.missing = -self.depth % (_STEP_BYTES // dtype.itemsize)
        self.bias = None if bias is None else bias.float().contiguous()
        self.dtype = torch.float32 if wide else dtype
        self.quantized = quantized
        depth, kind = self.depth + self.missing, KINDS[dtype]
        self.arguments = WeightsArguments(
            tiles.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            None if quantized is None else quantized.scales.data_ptr(),
            *(kind, kind if quantized is None else quantized.kind, self.columns, depth),
            depth if quantized is None or quantized.group >= self.depth else quantized.group,
            int(wide),
        )
        self.address = ctypes.addressof(self.arguments)


class PackedExperts:
    """Keeps what its arguments point at."""

    __slots__ = ("_arguments", "_experts", "_lists", "address")

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        own = len(experts.down)
        self._lists = [
            (c_void_p * own)(*(packed.address for packed in each))
            for each in (experts.gate_up, experts.down)
        ]
        self._arguments = ExpertsArguments(
            experts.router.address,
            *map(ctypes.addressof, self._lists),
            *(experts.router.columns, experts.chosen, experts.first, own),
            int(experts.normalizes),
        )
        self.address = ctypes.addressof(self._arguments)


def products_of(mlp: Mlp | Experts) -> list[PackedWeights]:
    if isinstance(mlp, Experts):
        return [mlp.router, *mlp.gate_up, *mlp.down]
    return [mlp.gate_up, mlp.down]


class PackedStack:
    """row_elements: of the call's workspace, per row of a step.

    between_elements: of another one, per row of an adapter.
    """

    __slots__ = (
        *("_adapted", "_each", "_experts", "_head_norms", "_layers", "_stack"),
        *("address", "between_elements", "row_elements"),
    )

    def __init__(self, layers: Layers) -> None:
        self._layers = layers  # what the arguments point at, and the head norms
        each = layers.each
        self._head_norms = [
            None if layer.head_norms is None else head_norm_arguments(layer.head_norms)
            for layer in each
        ]
        self._experts = [
            PackedExperts(layer.mlp) if isinstance(layer.mlp, Experts) else None for layer in each
        ]
        dense = [layer.mlp for layer in each if isinstance(layer.mlp, Mlp)]
        width = each[0].out.columns
        wide = max(
            packed.columns
            for packed in [mlp.gate_up for mlp in dense] + [layer.qkv for layer in each]
        )
        half = max(
            packed.depth for packed in [mlp.down for mlp in dense] + [layer.out for layer in each]
        )
        self.row_elements = width + wide + half
        self._adapted = [
            None if layer.adapted is None else adapted_arguments(layer.adapted) for layer in each
        ]
        adapted = [packed for layer in each for packed in layer.adapted or () if packed is not None]
        self.between_elements = max((packed.between_elements for packed in adapted), default=0)
        arguments = map(_layer_arguments, each, self._experts, self._head_norms, self._adapted)
        self._each = (LayerArguments * len(each))(*arguments)
        self._stack = StackArguments(
            ctypes.addressof(self._each),
            len(each),
            width,
            wide,
            half,
            ACTIVATIONS[layers.activation],
        )
        self.address = ctypes.addressof(self._stack)

    @staticmethod
    def takes(layers: Layers) -> bool:
        """Return whether no product of these layers needs padded rows."""
        return not any(
            packed.missing
            for layer in layers.each
            for packed in (layer.qkv, layer.out, *products_of(layer.mlp))
        )


def _layer_arguments(
    layer: Layer,
    experts: PackedExperts | None,
    head_norms: ctypes.Array[NormArguments] | None,
    adapted: ctypes.Array[AdaptedArguments] | None,
) -> LayerArguments:
    mlp = layer.mlp
    dense = (mlp.gate_up.address, mlp.down.address) if isinstance(mlp, Mlp) else (None, None)
    return LayerArguments(
        NormArguments(*norm_fields(layer.attention_norm)),
        NormArguments(*norm_fields(layer.mlp_norm)),
        *(layer.qkv.address, layer.out.address, *dense),
        None if experts is None else experts.address,
        None if head_norms is None else ctypes.addressof(head_norms),
        None if layer.sinks is None else layer.sinks.data_ptr(),
        None if adapted is None else ctypes.addressof(adapted),
        int(layer.rotates),
        layer.window or 0,
    )


def kernel_operations(library: ctypes.CDLL) -> RowOperations:
    """For logits in host memory, on torch's threads; the same bits as tensor operations."""
    sample_rows, rank_rows = (
        functools.partial(library.share_rows, ctypes.cast(getattr(library, name), c_void_p))
        for name in ("sample_rows", "rank_rows")
    )

    def pick(logits: Tensor, rows: Rows) -> Picks:
        picks = Picks(np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64))
        arrays = (rows.inverse_temperature, rows.top_k, rows.top_p, rows.min_p, rows.u)
        addresses = (array.ctypes.data for array in (*arrays, picks.token_ids, picks.status))
        arguments = SampleArguments(*_place_of(logits), *addresses)
        sample_rows(ctypes.addressof(arguments), 0, len(rows))
        if (picks.status == _NO_MEMORY).any():
            raise MemoryError("sampling: no memory for a row's tokens")
        return picks

    def rank(logits: Tensor, rows: NDArray[np.int64], count: int) -> TokenRanks:
        ranks = TokenRanks(
            np.empty((len(rows), count), dtype=np.int64),
            np.empty(len(rows), dtype=np.float32),
            np.empty(len(rows), dtype=np.float64),
        )
        addresses = (array.ctypes.data for array in (rows, ranks.ids, ranks.best, ranks.total))
        arguments = RankArguments(*_place_of(logits), count, *addresses)
        rank_rows(ctypes.addressof(arguments), 0, len(rows))
        if not ranks.total.all():
            raise MemoryError("log probabilities: no memory for a row's tokens")
        return ranks

    return RowOperations(pick, rank)


def _place_of(logits: Tensor) -> tuple[int, int, int]:
    assert logits.is_contiguous(), "a row of logits lies in one piece"
    return logits.data_ptr(), logits.stride(0), logits.shape[1]
