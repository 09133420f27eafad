"""LoRA adapters as the C kernels read them (kernels/adapters.h)."""

import ctypes
from ctypes import c_float, c_int64, c_void_p
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from pdcluster_worker.model.ops.adapters import AdapterParts, LayerAdapters, LowRank

_LANES = 16


class LowRankArguments(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("a", "b")),
        *((name, c_int64) for name in ("rank", "first", "columns")),
        ("scale", c_float),
    ]


class AdaptedArguments(ctypes.Structure):
    _fields_: ClassVar = [
        ("each", c_void_p),
        *((name, c_int64) for name in ("parts", "depth", "columns", "most_rank")),
    ]


class PackedAdapters:
    """Keeps the tensors that `arguments` points at.  columns: of the product.

    between_elements: float32 of the call's workspace, per row of an adapter.
    """

    __slots__ = ("_each", "_tensors", "address", "arguments", "between_elements")

    def __init__(self, parts: AdapterParts, columns: int) -> None:
        given = [part for each in parts for part in each]
        present = [part for part in given if part is not None]
        self._tensors = [
            None if part is None else (_panels(part.a), _panels(part.b)) for part in given
        ]
        self._each = (LowRankArguments * len(given))(*map(_arguments, given, self._tensors))
        num_parts = len(parts[0])
        depth = present[0].a.shape[1] if present else 0
        most_rank = _whole(max((len(part.a) for part in present), default=0))
        self.between_elements = num_parts * most_rank
        self.arguments = AdaptedArguments(
            ctypes.addressof(self._each), num_parts, depth, columns, most_rank
        )
        self.address = ctypes.addressof(self.arguments)


def adapted_arguments(layer: LayerAdapters) -> ctypes.Array[AdaptedArguments]:
    return (AdaptedArguments * len(layer))(*(packed.arguments for packed in layer))


def _arguments(part: LowRank | None, tensors: tuple[Tensor, Tensor] | None) -> LowRankArguments:
    if part is None or tensors is None:
        return LowRankArguments()
    sizes = len(part.a), part.first, len(part.b)
    return LowRankArguments(*(each.data_ptr() for each in tensors), *sizes, part.scale)


def _panels(weight: Tensor) -> Tensor:
    """[panels, columns, 16]: 16 rows side by side."""
    rows, columns = weight.shape
    padded = functional.pad(weight, (0, 0, 0, _whole(rows) - rows))
    return padded.view(-1, _LANES, columns).transpose(1, 2).contiguous()


def _whole(count: int) -> int:
    return -(-count // _LANES) * _LANES
