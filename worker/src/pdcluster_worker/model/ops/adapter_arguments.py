"""LoRA adapters as the C kernels read them (kernels/adapters.h)."""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int64, c_void_p
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from pdcluster_worker.model.ops.adapters import PANEL, AdaptedProduct, LayerAdapters, LowRank


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


class PackedProduct:
    """One adapter's part of a product.  Keeps the memory that `each` points at."""

    __slots__ = ("_memory", "columns", "depth", "each", "most_rank")

    def __init__(self, product: AdaptedProduct, take: Callable[[int], Tensor]) -> None:
        """take: memory, aligned to a cache line.  All of A, then all of B: as they are read."""
        parts, self.columns = product
        present = [part for part in parts if part is not None]
        halves = [_panels(part.a) for part in present] + [_panels(part.b) for part in present]
        self._memory = take(sum(half.nbytes for half in halves))
        starts = accumulate((half.nbytes for half in halves), initial=0)
        addresses = [self._memory.data_ptr() + start for start in starts]
        for half, start in zip(halves, addresses, strict=False):
            first = start - self._memory.data_ptr()
            self._memory[first : first + half.nbytes] = half.view(torch.uint8).flatten()
        placed = iter(zip(addresses, addresses[len(present) :], strict=False))
        self.each = [
            LowRankArguments() if part is None else _arguments(part, *next(placed))
            for part in parts
        ]
        self.depth = present[0].a.shape[1] if present else 0
        self.most_rank = _whole(max((len(part.a) for part in present), default=0), PANEL)


class PackedAdapters:
    """All adapters of a product; None = none has this place.

    between_elements: of the call's workspace, per row of an adapter.
    """

    __slots__ = ("_each", "_packed", "address", "arguments", "between_elements")

    def __init__(self, packed: Sequence[PackedProduct | None]) -> None:
        self._packed = present = [each for each in packed if each is not None]
        num_parts = len(present[0].each)
        empty = [LowRankArguments()] * num_parts
        arguments = [part for each in packed for part in (empty if each is None else each.each)]
        self._each = (LowRankArguments * len(arguments))(*arguments)
        most_rank = max(each.most_rank for each in present)
        self.between_elements = num_parts * most_rank
        self.arguments = AdaptedArguments(
            ctypes.addressof(self._each),
            *(num_parts, max(each.depth for each in present), present[0].columns, most_rank),
        )
        self.address = ctypes.addressof(self.arguments)


def adapted_arguments(layer: LayerAdapters) -> ctypes.Array[AdaptedArguments]:
    return (AdaptedArguments * len(layer))(
        *(AdaptedArguments() if packed is None else packed.arguments for packed in layer)
    )


def _arguments(part: LowRank, a: int, b: int) -> LowRankArguments:
    return LowRankArguments(a, b, len(part.a), part.first, len(part.b), part.scale)


def _panels(weight: Tensor) -> Tensor:
    """[panels, words, 16, elements]: 16 rows side by side, in words of 4 bytes."""
    rows, columns = weight.shape
    size = 4 // weight.itemsize
    padding = (0, _whole(columns, size) - columns, 0, _whole(rows, PANEL) - rows)
    padded = functional.pad(weight, padding)
    panels = torch.unflatten(torch.unflatten(padded, 0, (-1, PANEL)), 2, (-1, size))
    return panels.transpose(1, 2).contiguous()


def _whole(count: int, size: int) -> int:
    return -(-count // size) * size
