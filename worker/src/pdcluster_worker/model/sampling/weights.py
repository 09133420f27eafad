"""exp((logit - best) / temperature) of rows, with sums that are exact.

Weights are multiples of 2**-34 up to 1: a float64 adds 2**19 of them without rounding, so sums
have the same bits in any order.  Tokens below 2**-35 get weight 0.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

CHUNK = 1 << 18  # elements in host memory: a float32 temporary of 1 MiB stays in a core's cache
# elements on a device, where each chunk costs launches and a wait: 110 rows of 152k tokens
DEVICE_CHUNK = 1 << 24
# per element: eight float32 temporaries when whole rows are sorted (calculated, not measured)
CHUNK_BYTES = 32


def row_chunks(
    places: NDArray[np.int64], row_elements: int, chunk: int = CHUNK
) -> Iterator[NDArray[np.int64]]:
    """Chunks of at least one row."""
    size = max(1, chunk // row_elements)
    for start in range(0, len(places), size):
        yield places[start : start + size]


def device_chunk_bytes(num_elements: int) -> int:
    return CHUNK_BYTES * min(DEVICE_CHUNK, num_elements)


QUANTUM = 2.0**-34
# a float32 from here on is a multiple of QUANTUM; adding it to a smaller one rounds that
ROUND_BELOW = 2.0**-11
LOWEST = -32.0  # exp of this is far below QUANTUM and above the smallest float32
LOG2_E = math.log2(math.e)
# ln 2 in two parts: the first has 9 bits, so its product with a small integer is exact
LN2_HIGH = 355 / 512
LN2_LOW = math.log(2) - LN2_HIGH
# exp on [-ln2 / 2, ln2 / 2]: the first omitted term is 5e-9, 1/12 of a float32's rounding
TAYLOR = [1 / math.factorial(power) for power in range(7, -1, -1)]


def token_weights(logits: Tensor, best: Tensor, inverse_temperature: Tensor) -> Tensor:
    """logits: [R, N] float32, none over `best`, -inf allowed.
    best, inverse_temperature: [R] float32, finite.
    returns: [R, N] float32
    """
    x = (logits - best[:, None]).mul_(inverse_temperature[:, None]).clamp_(min=LOWEST)
    return _round(_exp(x))


def _exp(x: Tensor) -> Tensor:
    """exp of [LOWEST, 0]; `x` is overwritten."""
    # Two pieces of memory for all steps: fresh ones cost more than the arithmetic.
    power, series = x * LOG2_E, torch.empty_like(x)
    power.round_()
    x.sub_(torch.mul(power, LN2_HIGH, out=series)).sub_(torch.mul(power, LN2_LOW, out=series))
    torch.mul(x, TAYLOR[0], out=series)
    for coefficient in TAYLOR[1:-1]:
        series.add_(coefficient).mul_(x)
    series.add_(TAYLOR[-1])
    # 2**power, put together as the bits of a float32.
    bits = x.view(torch.int32).copy_(power.add_(127).mul_(1 << 23))
    return series.mul_(bits.view(torch.float32))


def _round(weights: Tensor) -> Tensor:
    # A choice by mask takes torch longer than all of the exponential, so both parts are added up.
    great = functional.threshold(weights, ROUND_BELOW, 0.0)
    return weights.sub_(great).add_(ROUND_BELOW).sub_(ROUND_BELOW).add_(great)


_LOW_BITS = (1 << 32) - 1
_TIE_CAPACITY = 2  # look at more tokens than needed, in case of ties at the end


def first_tokens(logits: Tensor, count: int) -> Tensor:
    """logits: [R, V] float32, not NaN; returns ids [R, min(count, V)] int64, in order."""
    vocab_size = logits.shape[1]
    count = min(count, vocab_size)
    if count == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    values, ids = logits.topk(min(count * _TIE_CAPACITY, vocab_size))
    first = _first(order_keys(values, ids), count)
    # Where even the last one looked at is an equal of the last wanted, there may be more of them.
    is_open = (values[:, count - 1] == values[:, -1]).nonzero()[:, 0]
    if len(is_open) and values.shape[1] < vocab_size:
        all_ids = torch.arange(vocab_size, device=logits.device)
        first[is_open] = _first(order_keys(logits[is_open], all_ids), count)
    return first


def order_keys(logits: Tensor, ids: Tensor) -> Tensor:
    """int64 keys, greater for earlier tokens.  logits: [R, N], not NaN; ids: [R, N] or [N]."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: a negative zero equals a positive one
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats in the order of integers
    return ordered.long().bitwise_left_shift_(32).bitwise_or_(_LOW_BITS - ids)


def _first(keys: Tensor, count: int) -> Tensor:
    return _LOW_BITS - (keys.topk(count).values & _LOW_BITS)
