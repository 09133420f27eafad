"""ctypes structures and signatures of the C kernels (kernels/model.h, product.h)."""

import ctypes
import functools
from ctypes import c_float, c_int64, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from pdcluster_worker.model.ops.operations import AttentionShape, HeadNorms, Norm, Rotation
from pdcluster_worker.model.sampling.sample_kernel import RowFunction
from pdcluster_worker.model.step_plan import StepPlan

KINDS = {torch.bfloat16: 0, torch.float32: 1}  # numbers in the kernels


class ModelArguments(ctypes.Structure):
    _fields_: ClassVar = [
        ("cache", c_void_p),
        *(
            (name, c_int64)
            for name in (
                "kind",
                "heads",
                "kv_heads",
                "dim",
                "block_size",
                "block_bytes",
                "head_bytes",
            )
        ),
        ("scaling", c_float),
    ]


class PlanArguments(ctypes.Structure):
    _fields_: ClassVar = [
        *(
            (name, c_void_p)
            for name in ("slots", "firsts", "lengths", "contexts", "seats", "tables")
        ),
        *(
            (name, c_int64)
            for name in ("rows", "num_tokens", "num_sequences", "num_decodes", "table_width")
        ),
    ]


class RotationArguments(ctypes.Structure):
    _fields_: ClassVar = [("cosine", c_void_p), ("sine", c_void_p), ("half", c_int64)]


class NormArguments(ctypes.Structure):
    _fields_: ClassVar = [("weight", c_void_p), ("epsilon", c_float), ("rounds_first", c_int64)]


class WeightsArguments(ctypes.Structure):
    _fields_: ClassVar = [
        ("tiles", c_void_p),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("kind", "columns", "depth", "is_wide")),
    ]


class LayerArguments(ctypes.Structure):
    _fields_: ClassVar = [
        ("attention_norm", NormArguments),
        ("mlp_norm", NormArguments),
        *((name, c_void_p) for name in ("qkv", "out", "gate_up", "down", "head_norms")),
        *((name, c_int64) for name in ("rotates", "window")),
    ]


class StackArguments(ctypes.Structure):
    _fields_: ClassVar = [
        ("layers", c_void_p),
        *((name, c_int64) for name in ("count", "width", "wide", "half", "is_silu")),
    ]


def model_arguments(cache: Tensor, shape: AttentionShape) -> ModelArguments:
    """cache: `[blocks, Hkv, layers, 2, block_size, D]`, contiguous from the layers on."""
    _, kv_heads, _, _, block_size, dim = cache.shape
    sizes = KINDS[cache.dtype], shape.num_heads, kv_heads, dim, block_size
    block_bytes, head_bytes = (cache.stride(axis) * cache.element_size() for axis in (0, 1))
    return ModelArguments(cache.data_ptr(), *sizes, block_bytes, head_bytes, shape.scaling)


def plan_arguments(plan: StepPlan) -> PlanArguments:
    """The plan's arrays must outlive the result."""
    arrays = (plan.slots, plan.firsts, plan.lengths, plan.contexts, plan.table_rows, plan.tables)
    sizes = (
        len(plan.slots),
        plan.num_tokens,
        len(plan.firsts),
        plan.num_decodes,
        plan.tables.shape[1],
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


def declare(library: ctypes.CDLL) -> None:
    """Declare types; without them ctypes would pass 32 bits of an address."""
    arguments: dict[str, list[type]] = {
        "add_rms_norm": [
            c_int64,
            c_void_p,
            c_void_p,
            c_void_p,
            c_int64,
            c_int64,
            c_void_p,
            c_float,
            c_int64,
        ],
        "gate_mul": [c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64],
        "rope_store": [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p],
        "attend": [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64],
        "layers": [c_void_p] * 6,
        "product": [c_void_p, c_void_p, c_void_p, c_int64],
        "packed_bytes": [c_int64, c_int64, c_int64],
        "pack": [c_int64, c_void_p, c_void_p, c_int64, c_int64],
        "unpack": [c_void_p, c_void_p, c_void_p, c_int64, c_int64],
    }
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = c_int64 if name in ("attend", "layers", "packed_bytes") else None


def shared_rows(library: ctypes.CDLL, name: str) -> RowFunction:
    """The function over rows, run on torch's threads."""
    function = ctypes.cast(getattr(library, name), ctypes.c_void_p)
    library.share_rows.argtypes, library.share_rows.restype = (
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
        None,
    )
    return functools.partial(library.share_rows, function)
