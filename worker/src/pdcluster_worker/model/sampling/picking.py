"""Sampling by plain tensor operations: the oracle of the kernels, and the fallback.

Order: temperature, min_p, top_k, top_p, then inverse CDF by token id.  A token's weight is
exp((logit - best) / temperature), a multiple of 2**-34 up to 1: a float64 adds 2**19 of them
without rounding, so sums have the same bits in any order.  Tokens below 2**-35 get weight 0.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pdcluster_worker.model.sampling.rows import Rows

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


FIRST_GUESS = 256  # tokens sorted at first; most of a chat model's mass is on fewer
WIDER = 8  # factor for rows that need more
# status: chosen; a logit is NaN or +inf; all logits are -inf
PICKED, NOT_FINITE, NOTHING_LEFT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Picks:
    """token_ids, status: [R] int64; a token counts only with PICKED."""

    token_ids: NDArray[np.int64]
    status: NDArray[np.int64]


def pick_tokens(logits: Tensor, rows: Rows, chunk: int = CHUNK) -> Picks:
    """logits: [R, V] float32, not modified."""
    values, greedy = (found.cpu().numpy() for found in logits.max(dim=1))  # hands NaN and +inf on
    status = np.where(np.isfinite(values), PICKED, NOT_FINITE)
    status[np.isneginf(values)] = NOTHING_LEFT
    is_free = rows.is_drawn & ~rows.is_cut & (status == PICKED)
    token_ids = greedy.copy()
    for places in row_chunks(np.flatnonzero(is_free), logits.shape[1], chunk):
        token_ids[places] = _draw(*_best_of(logits, greedy, places), rows.take(places))
    picks = Picks(token_ids, status)
    _pick_cut(logits, rows, picks, chunk)
    return picks


def _pick_cut(logits: Tensor, rows: Rows, picks: Picks, chunk: int) -> None:
    """Sample the rows with top_k or top_p, in place of the greedy tokens."""
    vocab_size, greedy = logits.shape[1], picks.token_ids.copy()
    left, count = np.flatnonzero(rows.is_cut & (picks.status == PICKED)), FIRST_GUESS
    while len(left):
        again = [left[:0]]
        for places in row_chunks(left, vocab_size, chunk):
            chosen, is_enough = _try_first(
                *_best_of(logits, greedy, places), rows.take(places), count
            )
            picks.token_ids[places[is_enough]] = chosen[is_enough]
            again.append(places[~is_enough])
        left, count = np.concatenate(again), count * WIDER


def _best_of(
    logits: Tensor, greedy: NDArray[np.int64], places: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    at = torch.from_numpy(places).to(logits.device)
    return logits[at], logits[at, torch.from_numpy(greedy[places]).to(logits.device)]


def _draw(logits: Tensor, best: Tensor, rows: Rows) -> NDArray[np.int64]:
    return _at_share(_weights(logits, best, rows), rows).cpu().numpy()


def _weights(logits: Tensor, best: Tensor, rows: Rows) -> Tensor:
    inverse_temperature = torch.from_numpy(rows.inverse_temperature).to(logits.device)
    weights = token_weights(logits, best, inverse_temperature)
    if rows.min_p.any():
        weights *= weights >= torch.from_numpy(rows.min_p).to(logits.device)[:, None]
    return weights


def _at_share(weights: Tensor, rows: Rows) -> Tensor:
    """[R] first index whose running sum of weights exceeds u of the total."""
    sums = weights.cumsum(1, dtype=torch.float64)
    total = sums[:, -1]
    u = torch.from_numpy(rows.u).to(weights.device)
    # u * total can round up to the total, which no sum exceeds.
    share = torch.minimum(total * u, total - QUANTUM)
    return torch.searchsorted(sums, share[:, None], right=True)[:, 0]


def _try_first(
    logits: Tensor, best: Tensor, rows: Rows, count: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draws from the `count` best tokens of each row, and whether those were enough."""
    vocab_size = logits.shape[1]
    ids = first_tokens(logits, count)
    top_k = torch.from_numpy(np.where(rows.top_k > 0, rows.top_k, vocab_size)).to(logits.device)
    weights = _weights(logits.gather(1, ids), best, rows)
    weights.masked_fill_(torch.arange(ids.shape[1], device=ids.device) >= top_k[:, None], 0.0)
    sums = weights.cumsum(1, dtype=torch.float64)
    needed = torch.from_numpy(rows.top_p).to(logits.device) * _kept_mass(logits, best, rows, sums)
    # top_p keeps a token when those before it do not reach the share yet.
    weights.masked_fill_(sums - weights >= needed[:, None], 0.0)
    by_id = ids.argsort(1)
    places = _at_share(weights.gather(1, by_id), rows)
    chosen = ids.gather(1, by_id.gather(1, places[:, None]))[:, 0]
    is_enough = torch.where(top_k < vocab_size, top_k <= count, sums[:, -1] >= needed)
    found = torch.stack((chosen, is_enough)).cpu().numpy()  # one wait for both
    return found[0], (found[1] > 0) | (ids.shape[1] == vocab_size)


def _kept_mass(logits: Tensor, best: Tensor, rows: Rows, sums: Tensor) -> Tensor:
    """[R] float64 mass after min_p and top_k; the last of `sums` where top_k is set."""
    places = np.flatnonzero(rows.top_k == 0)
    if not len(places):
        return sums[:, -1]
    mass = sums[:, -1].clone()
    whole = torch.from_numpy(places).to(logits.device)
    weights = _weights(logits[whole], best[whole], rows.take(places))
    mass[whole] = weights.sum(1, dtype=torch.float64)
    return mass
