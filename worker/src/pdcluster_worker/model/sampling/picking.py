"""Sampling by plain tensor operations: the oracle of the kernels, and the fallback.

Order: temperature, min_p, top_k, top_p, then inverse CDF by token id.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster_worker.model.sampling.rows import Rows
from pdcluster_worker.model.sampling.weights import (
    CHUNK,
    QUANTUM,
    first_tokens,
    row_chunks,
    token_weights,
)

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
