"""Weights in 8 bits, a scale for some columns of each row; the codes stay as they are in memory.

Every implementation multiplies with `dense` of the dtype that it computes in, so its results are
those with a checkpoint that was dequantized (docs/design/quantized-weights.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from pdcluster_worker.model.ops.stored_kv import LEAST, TOPS


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """codes: [N, K] int8, of FP8 their bits; dtype: int8 or float8_e4m3fn.

    scales: [N, K / group, up] float32, each for `group` columns, the last for what is left.
    """

    codes: Tensor
    scales: Tensor
    group: int
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[N, K], each element rounded once."""
        scales = self.scales.repeat_interleave(self.group, dim=1)[:, : self.shape[1]]
        return (self.codes.view(self.dtype).float() * scales).to(dtype)

    def to(self, device: torch.device) -> "QuantizedWeight":
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))

    def with_groups(self, group: int) -> "QuantizedWeight":
        """The same weights with a scale for each `group` columns, which divides the old one."""
        count = -(-self.shape[1] // group)
        scales = self.scales.repeat_interleave(self.group // group, dim=1)[:, :count]
        return replace(self, scales=scales, group=group)


Weight = Tensor | QuantizedWeight


def quantize_rows(weight: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """Quantize to the nearest, with one scale for each row: its greatest becomes the greatest code.

    The scale of a row that is not finite is not either.
    """
    wide = weight.float()
    scales = (wide.abs().amax(1, keepdim=True) / TOPS[dtype]).clamp(min=LEAST)
    exact = (wide / scales).clamp(-TOPS[dtype], TOPS[dtype])
    codes = (exact.round() if dtype == torch.int8 else exact).to(dtype).view(torch.int8)
    return QuantizedWeight(codes, scales, weight.shape[1], dtype)


def rows_of(weight: Weight, share: slice) -> Weight:
    if isinstance(weight, Tensor):
        return weight[share]
    return replace(weight, codes=weight.codes[share], scales=weight.scales[share])


def columns_of(weight: Weight, share: slice) -> Weight:
    """Groups become smaller where the ends of the share cut them."""
    if isinstance(weight, Tensor):
        return weight[:, share]
    width = weight.shape[1]
    fine = weight.with_groups(math.gcd(weight.group, share.start, share.stop % width))
    groups = slice(share.start // fine.group, -(-share.stop // fine.group))
    return replace(fine, codes=weight.codes[:, share], scales=fine.scales[:, groups])


def padded(weight: Weight, missing: int) -> Weight:
    """With so many rows of zeros after its own."""
    below = (0, 0, 0, missing)
    if isinstance(weight, Tensor):
        return functional.pad(weight, below)
    codes, scales = functional.pad(weight.codes, below), functional.pad(weight.scales, below)
    return replace(weight, codes=codes, scales=scales)


def dense_of(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dense(dtype)


def joined(weights: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """One below the other; of `dtype` where some are dense, or quantized in another way."""
    quantized = [each for each in weights if isinstance(each, QuantizedWeight)]
    ways = {(each.dtype, each.group) for each in quantized}
    if len(quantized) < len(weights) or len(ways) > 1:
        dense = [dense_of(each, dtype) for each in weights]
        return torch.cat(dense) if len(dense) > 1 else dense[0]
    codes = torch.cat([each.codes for each in quantized])
    return replace(quantized[0], codes=codes, scales=torch.cat([each.scales for each in quantized]))
