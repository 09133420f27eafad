"""Chooses one token a row by plain tensor operations: the oracle of the C kernel, and what runs
without it.

Order: temperature, min_p, top_k, top_p, then a draw by inverse CDF in the order
of token ids.  Whatever a row's result depends on is in its own logits and
settings: sums are exact (`model.sampling.weights`) and cuts follow one order of tokens
(`model.sampling.token_order`), so company, threads and the size of a first guess change nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster_worker.model.sampling.rows import Rows
from pdcluster_worker.model.sampling.token_order import first_tokens
from pdcluster_worker.model.sampling.weights import QUANTUM, slab_rows, token_weights

FIRST_GUESS = 256
"""Tokens of a row that are put in order at first; most of a chat model's mass is on fewer."""
WIDER = 8
"""Factor of the tokens that are sorted for rows that need more."""
PICKED, NOT_FINITE, NOTHING_LEFT = 0, 1, 2
"""Status of a row: chosen; a logit is NaN or +inf; every logit is -inf."""


@dataclass(frozen=True, slots=True)
class Picks:
    """token_ids, status: [R] int64; a token id counts where the status is PICKED."""

    token_ids: NDArray[np.int64]
    status: NDArray[np.int64]


def pick_tokens(logits: Tensor, rows: Rows) -> Picks:
    """One token for each row.  logits: [R, V] float32, not modified; a row that has none fails
    alone.
    """
    best, greedy = logits.max(dim=1)  # hands NaN and +inf on
    values, token_ids = best.cpu().numpy(), greedy.cpu().numpy()
    status = np.where(np.isfinite(values), PICKED, NOT_FINITE)
    status[np.isneginf(values)] = NOTHING_LEFT
    is_drawn = rows.is_drawn & (status == PICKED)
    for places in _slabs(np.flatnonzero(is_drawn & ~rows.is_cut), logits.shape[1]):
        token_ids[places] = _draw(logits[places], best[places], rows.take(places))
    for places in _slabs(np.flatnonzero(is_drawn & rows.is_cut), logits.shape[1]):
        token_ids[places] = _cut_and_draw(logits[places], best[places], rows.take(places))
    return Picks(token_ids, status)


def _slabs(places: NDArray[np.int64], vocab_size: int) -> Iterator[NDArray[np.int64]]:
    size = slab_rows(vocab_size)
    for start in range(0, len(places), size):
        yield places[start : start + size]


def _draw(logits: Tensor, best: Tensor, rows: Rows) -> NDArray[np.int64]:
    return _at_share(_weights(logits, best, rows), rows).cpu().numpy()


def _weights(logits: Tensor, best: Tensor, rows: Rows) -> Tensor:
    inverse_temperature = torch.from_numpy(rows.inverse_temperature).to(logits.device)
    weights = token_weights(logits, best, inverse_temperature)
    if rows.min_p.any():
        weights *= weights >= torch.from_numpy(rows.min_p).to(logits.device)[:, None]
    return weights


def _at_share(weights: Tensor, rows: Rows) -> Tensor:
    """[R] places of the draws: the first place that takes the running sum of the weights over u of
    their total.
    """
    sums = weights.cumsum(1, dtype=torch.float64)
    total = sums[:, -1]
    u = torch.from_numpy(rows.u).to(weights.device)
    # u * total can round up to the total, which no sum exceeds.
    share = torch.minimum(total * u, total - QUANTUM)
    return torch.searchsorted(sums, share[:, None], right=True)[:, 0]


def _cut_and_draw(logits: Tensor, best: Tensor, rows: Rows) -> NDArray[np.int64]:
    token_ids = np.zeros(len(rows), dtype=np.int64)
    left, count = np.arange(len(rows)), FIRST_GUESS
    while len(left):
        chosen, is_enough = _try_first(logits[left], best[left], rows.take(left), count)
        token_ids[left[is_enough]] = chosen[is_enough]
        left, count = left[~is_enough], count * WIDER
    return token_ids


def _try_first(
    logits: Tensor, best: Tensor, rows: Rows, count: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draws from the first `count` tokens of each row, and where that many were enough."""
    vocab_size = logits.shape[1]
    ids = first_tokens(logits, count)
    top_k = torch.from_numpy(np.where(rows.top_k > 0, rows.top_k, vocab_size)).to(logits.device)
    weights = _weights(logits.gather(1, ids), best, rows)
    weights.masked_fill_(torch.arange(ids.shape[1], device=ids.device) >= top_k[:, None], 0.0)
    sums = weights.cumsum(1, dtype=torch.float64)
    wanted = torch.from_numpy(rows.top_p).to(logits.device) * _kept_mass(logits, best, rows, sums)
    # top_p keeps a token when those before it do not reach the share yet.
    weights.masked_fill_(sums - weights >= wanted[:, None], 0.0)
    by_id = ids.argsort(1)
    places = _at_share(weights.gather(1, by_id), rows)
    chosen = ids.gather(1, by_id.gather(1, places[:, None]))[:, 0]
    is_enough = torch.where(top_k < vocab_size, top_k <= count, sums[:, -1] >= wanted)
    return chosen.cpu().numpy(), is_enough.cpu().numpy() | (ids.shape[1] == vocab_size)


def _kept_mass(logits: Tensor, best: Tensor, rows: Rows, sums: Tensor) -> Tensor:
    """[R] float64, what min_p and top_k leave; the last of `sums` where top_k is set."""
    mass = sums[:, -1].clone()
    whole = np.flatnonzero(rows.top_k == 0)
    if len(whole):
        weights = _weights(logits[whole], best[whole], rows.take(whole))
        mass[whole] = weights.sum(1, dtype=torch.float64)
    return mass
