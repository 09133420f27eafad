"""Quantized weights as tensors of a checkpoint's files, which stay mapped until they are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.loading.experts import in_halves, read_mxfp4, stacked_bytes
from pdcluster_worker.model.loading.quantization import WeightScheme, scheme_of
from pdcluster_worker.model.loading.support import UnsupportedArchError
from pdcluster_worker.model.ops.quantized_weight import QuantizedWeight

PRECISIONS = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
PARTS = (
    *("weight", "weight_packed", "weight_scale", "weight_scale_inv"),
    *("weight_zero_point", "weight_g_idx"),
)
"""Tensors that a quantized linear layer may have, beside its bias."""

_UNREAD = {
    "weight_zero_point": "zero points (weights.symmetric: false)",
    "weight_g_idx": "reordered groups (weights.actorder: group)",
}


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """name: of the linear layer."""

    name: str
    scheme: WeightScheme
    codes: Tensor  # as in the file, int32 where packed
    scales: Tensor  # [blocks of rows, blocks of columns]
    shape: tuple[int, int]

    @property
    def group(self) -> int:
        return self.scheme.block[1] or self.shape[1]

    @property
    def num_bytes(self) -> int:
        """In memory, with float32 scales of each row."""
        rows, columns = self.shape
        return rows * columns + 4 * rows * -(-columns // self.group)

    def read(self) -> QuantizedWeight:
        """Raises ModelError."""
        rows, columns = self.shape
        if self.scheme.is_packed:
            packed = self.codes.contiguous().view(torch.uint8)[:, :columns]
            codes = (packed ^ 128).view(torch.int8)
        else:
            codes = self.codes.contiguous().view(torch.int8)
        dtype = PRECISIONS[self.scheme.precision]
        is_nan = dtype != torch.int8 and bool(((codes & 127) == 127).any())
        if is_nan or not self.scales.isfinite().all():
            what = "codes of FP8" if is_nan else "scales"
            raise ModelError(f"{self.name} has {what} that are not finite: copy the model again")
        scales = self.scales.float().repeat_interleave(self.scheme.block[0] or rows, dim=0)[:rows]
        return QuantizedWeight(codes, scales, self.group, dtype)


@dataclass(frozen=True, slots=True)
class StoredStack:
    """Weights of all experts in MXFP4.  has_turns: rows are of gate and up in turns."""

    name: str
    scheme: WeightScheme
    blocks: Tensor
    scales: Tensor
    has_turns: bool

    @property
    def num_bytes(self) -> int:
        """In memory, in 8 bits."""
        return stacked_bytes(self.blocks.shape)

    def read(self, expert: int) -> QuantizedWeight:
        """Raises ModelError."""
        parts = self.blocks[expert], self.scales[expert]
        blocks, scales = map(in_halves, parts) if self.has_turns else parts
        return read_mxfp4(self.name, blocks, scales)


def stored_weight(
    name: str, parts: Mapping[str, Tensor], schemes: Sequence[WeightScheme], shape: tuple[int, int]
) -> StoredWeight | None:
    """A linear layer's weight where the files have it quantized.  Raises UnsupportedArchError.

    parts: its tensors, by the names of PARTS.
    """
    scheme = scheme_of(name, schemes)
    if scheme is None or scheme.scale not in parts:
        return None
    for part, what in _UNREAD.items():
        if part in parts:
            raise UnsupportedArchError(f"{name} has {what}")
    rows, columns = shape
    height, width = (size or whole for size, whole in zip(scheme.block, shape, strict=True))
    grid = -(-rows // height), -(-columns // width)
    scales = parts[scheme.scale]
    lengths = [[size for size in each if size != 1] for each in (scales.shape, grid)]
    if lengths[0] != lengths[1] or not scales.is_floating_point():
        given = f"{scales.dtype} {[*scales.shape]}"
        raise UnsupportedArchError(f"{name}.{scheme.scale} is {given}, not {[*grid]} numbers")
    part = "weight_packed" if scheme.is_packed else "weight"
    dtype, found = PRECISIONS[scheme.precision], parts.get(part)
    if scheme.is_packed:
        dtype, shape_of_file = torch.int32, (rows, -(-columns // 4))
    else:
        shape_of_file = shape
    if found is None or found.dtype != dtype or found.shape != shape_of_file:
        given = "missing" if found is None else f"{found.dtype} {[*found.shape]}"
        raise UnsupportedArchError(f"{name}.{part} is {given}, not {dtype} {[*shape_of_file]}")
    return StoredWeight(name, scheme, found, scales.reshape(grid), shape)
