"""Keys and values as a KV cache holds them: as computed, or quantized row by row.

A row (a token's key or value of one head) is quantized by itself, so its bytes depend neither on
the other tokens of its block nor on the order in which they came (docs/design/quantized-kv.md).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TOPS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Greatest number of each quantized dtype; the greatest of a row becomes it."""

LEAST, MOST = 2.0**-119, 3e38
"""Rows below are 0; numbers above become this one, so that no scale or product is infinite."""


@dataclass(frozen=True, slots=True)
class StoredKV:
    """rows: `[blocks, Hkv, layers, 2, block_size, D]`; dtype: that keys and values are computed in.

    scales: the same without D, float32, in the same memory, a block's behind its rows; None where
    rows are not quantized.
    """

    rows: Tensor
    scales: Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, cache: "Tensor | StoredKV") -> "StoredKV":
        return cls(cache, None, cache.dtype) if isinstance(cache, Tensor) else cache

    @property
    def block_size(self) -> int:
        return self.rows.shape[4]

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def is_whole(self) -> bool:
        """Return whether all layers of a head are in one piece."""
        half = self.rows.stride(3)
        return self.rows.stride()[2:] == (2 * half, half, self.rows.shape[5], 1)

    def write(self, blocks: Tensor, offsets: Tensor, layer: int, half: int, x: Tensor) -> None:
        """x: [T, Hkv, D], keys (half 0) or values (half 1) of T slots."""
        # Advanced indices apart from one another put the rows first: [T, Hkv, D].
        if self.scales is None:
            self.rows[blocks, :, layer, half, offsets] = x.to(self.rows.dtype)
            return
        rows, scales = quantize(x, self.rows.dtype)
        # torch has no indices of float8
        self.rows.view(torch.int8)[blocks, :, layer, half, offsets] = rows.view(torch.int8)
        self.scales[blocks, :, layer, half, offsets] = scales

    def read(self, blocks: Tensor, layer: int) -> Tensor:
        """[n, Hkv, 2, block_size, D] of these blocks, float32 where rows are quantized."""
        if self.scales is None:
            return self.rows[:, :, layer].index_select(0, blocks).to(self.dtype)
        rows = self.rows.view(torch.int8)[:, :, layer].index_select(0, blocks)
        scales = self.scales[:, :, layer].index_select(0, blocks)
        return rows.view(self.rows.dtype).float() * scales.unsqueeze(-1)


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [..., D] of dtype and scales [...]; x is about rows * scales.

    A row that has no finite maximum gets zeros and the scale NaN, so all that read it are NaN.
    """
    wide, top = x.float(), torch.tensor(TOPS[dtype], device=x.device)
    greatest = wide.abs().amax(-1)
    is_finite = greatest.isfinite()
    is_large = is_finite & (greatest >= LEAST)
    size = torch.where(is_large, greatest.clamp(max=MOST), 1.0)
    scaled = (wide * (top / size).unsqueeze(-1)).clamp(-top, top)
    scaled = torch.where(is_large.unsqueeze(-1), scaled, 0.0)
    scales = torch.where(is_large, size * (1.0 / TOPS[dtype]), 0.0)
    rows = scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)
    return rows, torch.where(is_finite, scales, float("nan"))
