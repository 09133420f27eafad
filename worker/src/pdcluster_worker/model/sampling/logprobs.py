"""Log probabilities of the unedited logits, independent of the batch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster_worker.model.sampling.weights import CHUNK, first_tokens, row_chunks, token_weights


@dataclass(frozen=True, slots=True)
class LogprobsRequest:
    """Log probabilities of the chosen token and of the `count` best."""

    row: int
    token_id: int
    count: int


@dataclass(frozen=True, slots=True)
class TokenRanks:
    ids: NDArray[np.int64]  # [R, count] best tokens, in `token_order`
    best: NDArray[np.float32]  # [R] greatest logit
    total: NDArray[np.float64]  # [R] sum of all weights at temperature 1


# of contiguous logits [R, V], the rows, and the count
Rank = Callable[[Tensor, NDArray[np.int64], int], TokenRanks]

# of the chosen token, and (token id, log probability) of the best ones
Logprobs = tuple[float, tuple[tuple[int, float], ...]]


def logprobs(logits: Tensor, needed: Sequence[LogprobsRequest], rank: Rank) -> list[Logprobs]:
    """logits: [R, V] float32, finite in the needed rows."""
    rows = np.array([one.row for one in needed])
    count = min(max(one.count for one in needed), logits.shape[1])
    ranks = rank(logits, rows, count)
    chosen = np.array([[one.token_id] for one in needed])
    ids = np.concatenate([chosen, ranks.ids], axis=1)
    values = logits.view(-1)[
        torch.from_numpy(rows[:, None] * logits.shape[1] + ids).to(logits.device)
    ]
    # math.log for each row: a vectorized logarithm could round by position.
    logarithms = np.array([math.log(total) for total in ranks.total.tolist()])
    shares = values.double().cpu().numpy() - ranks.best[:, None] - logarithms[:, None]
    figures = shares.astype(np.float32).tolist()
    rated = zip(ids.tolist(), figures, needed, strict=True)
    return [_entry(row_ids, values, one.count) for row_ids, values, one in rated]


def rank_tokens(
    logits: Tensor, rows: NDArray[np.int64], count: int, chunk: int = CHUNK
) -> TokenRanks:
    """By plain tensor operations.  logits: [R, V] float32; the rows are finite."""
    parts = [
        _rank_chunk(logits[torch.from_numpy(places).to(logits.device)], count)
        for places in row_chunks(rows, logits.shape[1], chunk)
    ]
    ids, best, total = (torch.cat(found).cpu().numpy() for found in zip(*parts, strict=True))
    return TokenRanks(ids, best, total)


def _rank_chunk(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    best = logits.amax(1)
    weights = token_weights(logits, best, torch.ones_like(best))
    return first_tokens(logits, count), best, weights.sum(1, dtype=torch.float64)


def _entry(ids: list[int], values: list[float], count: int) -> Logprobs:
    pairs = list(zip(ids, values, strict=True))
    return values[0], tuple(pairs[1 : count + 1])
