"""exp((logit - best) / temperature) of whole rows, as numbers whose sums are exact.

Every weight is a multiple of 2**-34, and the best token's is 1.  A float64 adds
up to 2**19 of them without rounding, so a sum has the same bits in any order: in
any batch, on any number of threads, by any kernel.  What that costs: a token
less likely than 2**-35 (3e-11) of the best one has weight 0.

The exponential is made of multiplications and additions alone, each rounded
once, so kernels with other vector widths compute the same bits.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

QUANTUM = 2.0**-34
ROUND_BELOW = 2.0**-11
"""A float32 from here on is a multiple of QUANTUM already; adding it to a smaller one
rounds that.
"""
LOWEST = -32.0
"""exp of this is far below QUANTUM, and far above the least float32."""
LOG2_E = math.log2(math.e)
LN2_HIGH = 355 / 512
"""ln 2 in two parts: the first has 9 bits, so its product with a small integer is exact."""
LN2_LOW = math.log(2) - LN2_HIGH
TAYLOR = [1 / math.factorial(power) for power in range(7, -1, -1)]
"""Taylor series of exp on [-ln2 / 2, ln2 / 2]: the first term left out is 5e-9, a twelfth of a
float32's rounding.
"""


def token_weights(logits: Tensor, best: Tensor, inverse_temperature: Tensor) -> Tensor:
    """Weights of tokens against their rows' best.

    logits: [R, N] float32, none over `best`, -inf allowed.  best, inverse_temperature: [R] float32,
            finite.
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
