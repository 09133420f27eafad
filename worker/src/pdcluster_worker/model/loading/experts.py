"""Experts of a model: their numbers in config.json, and the names of their weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.ops.quantized_weight import QuantizedWeight

# halves of e2m1's numbers are no integers, so codes are twice the numbers
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_PAIRS = np.array(
    [(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)], dtype=np.int8
).view(np.int16)[:, 0]
_GROUP = 32  # columns that share a scale
_BIAS = 127  # of a scale's exponent
_NO_NUMBER = 255  # a scale that is NaN


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Below a layer.  gate, up, down: below an expert; is_stacked: one tensor has those of all,
    turned, with gate and up in turns (gpt-oss).
    """

    router: str
    each: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    inner: str = "intermediate_size"  # field of config.json
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Mixture:
    """is_mixed: of each layer; others have one expert that is always chosen, an MLP."""

    names: ExpertNames
    count: int
    chosen: int
    inner: int  # features of an expert
    normalizes: bool
    is_mixed: tuple[bool, ...]

    def step_bytes(self, num_rows: int, width: int, dtype: torch.dtype) -> int:
        """Memory that kernels/experts.h keeps after a step of so many rows."""
        num_chosen = num_rows * self.chosen
        facts = 4 * num_rows * self.count + 12 * num_chosen  # logits; weights, numbers and places
        rows = num_chosen * (width + 3 * self.inner) * dtype.itemsize
        return (facts + rows) * 5 // 4

    def shapes(self, path: str, width: int, *, is_mxfp4: bool) -> dict[str, tuple[int, ...]]:
        """Weights of a layer at `path`."""
        names, router = self.names, f"{path}.{self.names.router}"
        shapes: dict[str, tuple[int, ...]] = {f"{router}.weight": (self.count, width)}
        each = f"{path}.{names.each}"
        if not names.is_stacked:
            for expert in range(self.count):
                shapes |= {
                    f"{each}.{expert}.{names.gate}.weight": (self.inner, width),
                    f"{each}.{expert}.{names.up}.weight": (self.inner, width),
                    f"{each}.{expert}.{names.down}.weight": (width, self.inner),
                }
            return shapes
        shapes[f"{router}.bias"] = (self.count,)
        sizes = {"gate_up_proj": (2 * self.inner, width), "down_proj": (width, self.inner)}
        for name, (rows, columns) in sizes.items():
            shapes[f"{each}.{name}_bias"] = (self.count, rows)
            if is_mxfp4:
                groups = columns // _GROUP
                shapes[f"{each}.{name}_blocks"] = (self.count, rows, groups, _GROUP // 2)
                shapes[f"{each}.{name}_scales"] = (self.count, rows, groups)
            else:
                shapes[f"{each}.{name}"] = (self.count, columns, rows)
        return shapes


def in_halves(rows: Tensor) -> Tensor:
    """Gate and up one after the other, of rows that have them in turns."""
    return torch.cat((rows[0::2], rows[1::2]))


def read_mxfp4(name: str, blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """Numbers of 4 bits with scales of 8 bits, exactly, in codes of 8 bits.  Raises ModelError.

    blocks: [N, groups, 16] pairs, the lower half first; scales: [N, groups] exponents.
    """
    if (scales == _NO_NUMBER).any():
        raise ModelError(f"{name} has scales that are not finite: copy the model again")
    codes = torch.from_numpy(_PAIRS[blocks.numpy()].view(np.int8)).flatten(1)
    # codes are twice the numbers
    factors = torch.exp2(scales.float() - (_BIAS + 1))
    return QuantizedWeight(codes, factors, _GROUP, torch.int8)


def stacked_bytes(shapes: Sequence[int]) -> int:
    """Bytes of what `read_mxfp4` makes of blocks of this shape."""
    count, rows, groups, _ = shapes
    return count * rows * groups * (_GROUP + 4)
