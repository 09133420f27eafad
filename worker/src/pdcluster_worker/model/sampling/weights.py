"""exp((logit - best) / temperature) of rows, with sums that are exact.

Weights are multiples of 2**-34 up to 1: a float64 adds 2**19 of them without rounding, so sums
have the same bits in any order.  Tokens below 2**-35 get weight 0.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

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
