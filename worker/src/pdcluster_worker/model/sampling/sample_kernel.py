"""The C kernels of ops/kernels/sample.c as `RowOperations`; the same bits as tensor operations."""

import ctypes
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pdcluster_worker.model.sampling.logprobs import TokenRanks
from pdcluster_worker.model.sampling.picking import Picks
from pdcluster_worker.model.sampling.rows import Rows
from pdcluster_worker.model.sampling.sampler import RowOperations

_NO_MEMORY = 3

# (address of the arguments, first row, one past the last row)
RowFunction = Callable[[int, int, int], None]


class SampleArguments(ctypes.Structure):
    _fields_: ClassVar = [
        ("logits", c_void_p),
        ("stride", c_int64),
        ("vocab_size", c_int64),
        *((name, c_void_p) for name in ("inverse_temperature", "top_k", "top_p", "min_p", "u")),
        *((name, c_void_p) for name in ("token_ids", "status")),
    ]


class RankArguments(ctypes.Structure):
    _fields_: ClassVar = [
        ("logits", c_void_p),
        ("stride", c_int64),
        ("vocab_size", c_int64),
        ("count", c_int64),
        *((name, c_void_p) for name in ("rows", "ids", "best", "total")),
    ]


def row_function(library: ctypes.CDLL, name: str) -> RowFunction:
    """Raises AttributeError for a missing function."""
    function = getattr(library, name)
    function.argtypes, function.restype = (c_void_p, c_int64, c_int64), None
    found: RowFunction = function
    return found


def kernel_operations(sample_rows: RowFunction, rank_rows: RowFunction) -> RowOperations:
    """For logits in host memory."""

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
