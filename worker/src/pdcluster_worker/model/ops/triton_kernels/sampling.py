"""The choice of a token from a row of logits that is not cut by top_k or top_p: the same token as
`model.sampling.picking`, bit for bit.

A program reads its own row, three times at most, and keeps nothing of it in memory.  Weights
are multiples of a quantum, so they are added up as integers, which have no order.
Compile it without contraction: each product and sum of the exponential is rounded once.
"""

import math

import triton
import triton.language as tl

from pdcluster_worker.model.sampling import picking, weights

PICKED = tl.constexpr(picking.PICKED)
NOT_FINITE = tl.constexpr(picking.NOT_FINITE)
NOTHING_LEFT = tl.constexpr(picking.NOTHING_LEFT)
LOWEST = tl.constexpr(weights.LOWEST)
LOG2_E = tl.constexpr(weights.LOG2_E)
LN2_HIGH, LN2_LOW = tl.constexpr(weights.LN2_HIGH), tl.constexpr(weights.LN2_LOW)
TAYLOR_7, TAYLOR_6, TAYLOR_5, TAYLOR_4, TAYLOR_3, TAYLOR_2, TAYLOR_1, TAYLOR_0 = map(
    tl.constexpr, weights.TAYLOR
)
ROUND_BELOW = tl.constexpr(weights.ROUND_BELOW)
QUANTA = tl.constexpr(1 / weights.QUANTUM)
"""Quanta of the weight of the best token: a power of two, so a product with it is exact."""
TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
"""Added and subtracted, it leaves the nearest integer, of two as near ones the even one."""
INFINITY = tl.constexpr(math.inf)


@triton.jit
def _quanta(
    logits: tl.tensor,
    best: tl.tensor,
    inverse_temperature: tl.tensor,
    min_p: tl.tensor,
) -> tl.tensor:
    """Weights of logits against their row's best, int64 numbers of quanta; 0 below min_p."""
    x = tl.maximum((logits - best) * inverse_temperature, LOWEST)
    power = (x * LOG2_E + TO_INTEGER) - TO_INTEGER
    x = (x - power * LN2_HIGH) - power * LN2_LOW
    series = x * TAYLOR_7 + TAYLOR_6
    series = series * x + TAYLOR_5
    series = series * x + TAYLOR_4
    series = series * x + TAYLOR_3
    series = series * x + TAYLOR_2
    series = series * x + TAYLOR_1
    series = series * x + TAYLOR_0
    # 2**power, put together as the bits of a float32.
    weight = series * ((power + 127.0) * 8388608.0).to(tl.int32).to(tl.float32, bitcast=True)
    weight = tl.where(weight < ROUND_BELOW, (weight + ROUND_BELOW) - ROUND_BELOW, weight)
    return (tl.where(weight >= min_p, weight, 0.0) * QUANTA).to(tl.int64)


@triton.jit
def _part(
    row: tl.tensor, start: tl.tensor, vocab_size: tl.constexpr, block: tl.constexpr
) -> tl.tensor:
    """Logits from token `start` on; beyond the vocabulary those of tokens without weight."""
    ids = start + tl.arange(0, block)
    return tl.load(row + ids, mask=ids < vocab_size, other=-INFINITY)


@triton.jit
def _best(row: tl.tensor, vocab_size: tl.constexpr, block: tl.constexpr) -> tl.tuple:
    """The greatest logit, the first token that has it, and the row's status."""
    lanes = tl.arange(0, block)
    best = tl.full([block], -INFINITY, tl.float32)
    at = tl.zeros([block], tl.int32)
    is_bad = tl.zeros([block], tl.int32)
    for start in range(0, vocab_size, block):
        x = _part(row, start, vocab_size, block)
        is_bad = tl.where(x < INFINITY, is_bad, 1)  # no NaN is below
        is_better = x > best
        best, at = tl.where(is_better, x, best), tl.where(is_better, start + lanes, at)
    top = tl.max(best, axis=0)
    first = tl.min(tl.where(best == top, at, vocab_size), axis=0)
    status = tl.where(top == -INFINITY, NOTHING_LEFT, PICKED)
    return top, first, tl.where(tl.max(is_bad, axis=0) > 0, NOT_FINITE, status)


@triton.jit
def pick(
    logits: tl.tensor,
    settings: tl.tensor,
    picks: tl.tensor,
    vocab_size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program a row.

    settings: [R, 3] float64: inverse temperature, 0 for a greedy row, min_p, u.
    picks: [R, 2] int64: token, status.
    """
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * vocab_size
    best, token, status = _best(row, vocab_size, block)
    inverse_temperature = tl.load(settings + number * 3).to(tl.float32)
    if (status == PICKED) & (inverse_temperature > 0.0):
        min_p = tl.load(settings + number * 3 + 1).to(tl.float32)
        sums = tl.zeros([block], tl.int64)
        for start in range(0, vocab_size, block):
            x = _part(row, start, vocab_size, block)
            sums += _quanta(x, best, inverse_temperature, min_p)
        total = tl.sum(sums, axis=0).to(tl.float64)
        # u * total can round up to the total, which no sum exceeds.
        share = tl.minimum(total * tl.load(settings + number * 3 + 2), total - 1.0)
        limit = share.to(tl.int64)  # cut off: a sum over the share is over this too
        before, first = tl.zeros([], tl.int64), 0
        found = _quanta(_part(row, first, vocab_size, block), best, inverse_temperature, min_p)
        inside = tl.sum(found, axis=0)
        while before + inside <= limit:
            before += inside
            first += block
            found = _quanta(_part(row, first, vocab_size, block), best, inverse_temperature, min_p)
            inside = tl.sum(found, axis=0)
        is_passed = before + tl.cumsum(found, axis=0) <= limit
        token = first + tl.sum(is_passed.to(tl.int32), axis=0)
    tl.store(picks + number * 2, token.to(tl.int64))
    tl.store(picks + number * 2 + 1, status.to(tl.int64))
