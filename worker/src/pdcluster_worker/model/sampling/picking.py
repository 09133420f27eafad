"""Chooses one token a row by plain tensor operations, where the logits are: the oracle of the
kernels, and what runs without them.

Order: temperature, min_p, top_k, top_p, then a draw by inverse CDF in the order
of token ids.  Whatever a row's result depends on is in its own logits and
settings: sums are exact (`model.sampling.weights`) and cuts follow one order of tokens
(`model.sampling.token_order`), so company, threads and the size of a first guess change nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster_worker.model.sampling.row_chunks import CHUNK, row_chunks
from pdcluster_worker.model.sampling.rows import Rows
from pdcluster_worker.model.sampling.token_order import first_tokens
from pdcluster_worker.model.sampling.weights import QUANTUM, token_weights

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


def pick_tokens(logits: Tensor, rows: Rows, chunk: int = CHUNK) -> Picks:
    """One token for each row; a row that has none fails alone.

    logits: [R, V] float32, not modified.  slab: see `model.sampling.row_chunks`.
    """
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
    """Draw the tokens of the rows that are cut in place of their greedy ones, which `picks` has."""
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
    """A copy of the logits of these rows, and the best of each."""
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
    """[R] places of the draws: the first place that takes the running sum of the weights over u of
    their total.
    """
    sums = weights.cumsum(1, dtype=torch.float64)
    total = sums[:, -1]
    u = torch.from_numpy(rows.u).to(weights.device)
    # u * total can round up to the total, which no sum exceeds.
    share = torch.minimum(total * u, total - QUANTUM)
    return torch.searchsorted(sums, share[:, None], right=True)[:, 0]


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
    """[R] float64, what min_p and top_k leave; the last of `sums` where top_k is set."""
    places = np.flatnonzero(rows.top_k == 0)
    if not len(places):
        return sums[:, -1]
    mass = sums[:, -1].clone()
    whole = torch.from_numpy(places).to(logits.device)
    weights = _weights(logits[whole], best[whole], rows.take(places))
    mass[whole] = weights.sum(1, dtype=torch.float64)
    return mass
