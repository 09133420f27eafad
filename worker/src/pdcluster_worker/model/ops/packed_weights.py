"""Weights packed for the CPU kernels in huge pages, and argument structures that point at them."""

import ctypes
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.ops.kernel_arguments import (
    KINDS,
    LayerArguments,
    NormArguments,
    StackArguments,
    WeightsArguments,
    norm_fields,
)
from pdcluster_worker.model.ops.operations import HeadNorms, Layer, Layers

_STEP_BYTES = 64  # rows of x are read in pieces of this many bytes
_MAP_BYTES = 64 << 20
_CACHE_LINE_BYTES = 64


class HugePages:
    """Allocates from large maps, because a map smaller than a huge page has none."""

    def __init__(self) -> None:
        self._map = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, aligned to a cache line."""
        if self._used_bytes + num_bytes > len(self._map):
            self._map, self._used_bytes = _new_map(max(num_bytes, _MAP_BYTES)), 0
        piece = self._map[self._used_bytes : self._used_bytes + num_bytes]
        self._used_bytes += -(-num_bytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        return piece


def _new_map(num_bytes: int) -> Tensor:
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise ModelError(
            f"no memory for {num_bytes} bytes of packed weights: use a smaller model or a larger "
            "machine"
        ) from e
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class PackedWeights:
    """Keeps the tensors that `arguments` points at."""

    __slots__ = ("address", "arguments", "bias", "columns", "depth", "dtype", "missing", "tiles")

    def __init__(self, tiles: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool) -> None:
        self.tiles = tiles
        self.columns, self.depth = weight.shape
        self.missing = -self.depth % (_STEP_BYTES // weight.dtype.itemsize)
        self.bias = None if bias is None else bias.float().contiguous()
        self.dtype = torch.float32 if wide else weight.dtype
        bias_address = None if self.bias is None else self.bias.data_ptr()
        sizes = self.columns, self.depth + self.missing, int(wide)
        self.arguments = WeightsArguments(
            tiles.data_ptr(), bias_address, KINDS[weight.dtype], *sizes
        )
        self.address = ctypes.addressof(self.arguments)


class PackedStack:
    """row_elements: of the call's workspace, per row of a step."""

    __slots__ = ("_each", "_layers", "_stack", "address", "row_elements")

    def __init__(self, layers: Layers, norms_address: Callable[[HeadNorms], int]) -> None:
        """norms_address: of head norms, valid as long as the stack."""
        self._layers = layers  # what the arguments point at
        each = layers.each
        width = each[0].out.columns
        wide = max(packed.columns for layer in each for packed in (layer.qkv, layer.gate_up))
        half = max(packed.depth for layer in each for packed in (layer.out, layer.down))
        self.row_elements = width + wide + half
        self._each = (LayerArguments * len(each))(
            *(_layer_arguments(layer, norms_address) for layer in each)
        )
        self._stack = StackArguments(
            ctypes.addressof(self._each),
            len(each),
            width,
            wide,
            half,
            int(layers.activation == "silu"),
        )
        self.address = ctypes.addressof(self._stack)

    @staticmethod
    def takes(layers: Layers) -> bool:
        """Return whether no product of these layers needs padded rows."""
        return not any(
            packed.missing
            for layer in layers.each
            for packed in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )


def _layer_arguments(layer: Layer, norms_address: Callable[[HeadNorms], int]) -> LayerArguments:
    return LayerArguments(
        NormArguments(*norm_fields(layer.attention_norm)),
        NormArguments(*norm_fields(layer.mlp_norm)),
        *(packed.address for packed in (layer.qkv, layer.out, layer.gate_up, layer.down)),
        None if layer.head_norms is None else norms_address(layer.head_norms),
        int(layer.rotates),
        layer.window or 0,
    )
