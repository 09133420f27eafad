"""Samples a token per row, independent of the batch; a row without a token fails alone.

Order: penalties, bias, bans, constraint masks, then `picking`'s.  Log probabilities are of the
unedited logits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster_worker.engine.ports import Sample, failed_row
from pdcluster_worker.engine.request import SamplePlace
from pdcluster_worker.errors import RequestError
from pdcluster_worker.model.sampling.penalties import PenaltyState
from pdcluster_worker.model.sampling.picking import (
    CHUNK,
    NOT_FINITE,
    PICKED,
    Picks,
    first_tokens,
    pick_tokens,
    row_chunks,
    token_weights,
)
from pdcluster_worker.model.sampling.rows import Rows, plan_rows
from pdcluster_worker.structured_output.masks import Masks


@dataclass(frozen=True, slots=True)
class LogprobsRequest:
    """Log probabilities of the chosen token and of the `count` best."""

    row: int
    token_id: int
    count: int


@dataclass(frozen=True, slots=True)
class TokenRanks:
    ids: NDArray[np.int64]  # [R, count] best tokens, as `first_tokens` orders them
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


Pick = Callable[[Tensor, Rows], Picks]  # of contiguous logits [R, V]


# waits for the forward pass and gives its logits in the memory that `RowOperations` reads
Receive = Callable[[Tensor], Tensor]


def in_host_memory(logits: Tensor) -> Tensor:
    return logits.cpu()


@dataclass(frozen=True, slots=True)
class RowOperations:
    """Row-wise operations, in the memory where tokens are chosen; all give the same bits."""

    pick: Pick = pick_tokens
    rank: Rank = rank_tokens
    receive: Receive = in_host_memory


PLAIN_TENSORS = RowOperations()


def masked(logits: Tensor, masks: Masks) -> Tensor:
    """A copy with disallowed tokens at -inf; rows that are not finite stay as they are."""
    rows = torch.from_numpy(masks.rows).to(logits.device)
    found = logits if len(rows) == len(logits) else logits[rows]
    hidden = found.amax(1, keepdim=True)  # hands NaN and +inf on
    kept = torch.from_numpy(masks.allowed).to(logits.device) | ~(hidden < float("inf"))
    left = torch.where(kept, found, float("-inf"))
    return left if found is logits else logits.index_copy(0, rows, left)


class Sampler:
    """Keeps token counts of requests with penalties."""

    def __init__(self, vocab_size: int, row_ops: RowOperations = PLAIN_TENSORS) -> None:
        self._vocab_size = vocab_size
        self._penalties = PenaltyState(vocab_size)
        self._row_ops = row_ops

    def sample(
        self, logits: Tensor, requests: Sequence[SamplePlace], masks: Masks | None = None
    ) -> list[Sample | RequestError]:
        rows = plan_rows(requests, self._vocab_size)
        edits, errors = self._penalties.edits(requests)
        with edits.applied(logits) as bad_rows:
            if masks is None:
                picks = self._row_ops.pick(logits, rows)
            else:
                picks = self._row_ops.pick(masked(logits, masks), rows)
                errors |= masks.errors
        picks.status[bad_rows] = NOT_FINITE
        for row in np.flatnonzero(picks.status != PICKED).tolist():
            errors.setdefault(row, self._error(logits[row], requests[row], picks.status[row]))
        samples = self._samples(logits, requests, picks.token_ids, errors)
        return [errors[row] if row in errors else samples[row] for row in range(len(requests))]

    def forget(self, request_id: str) -> None:
        self._penalties.forget(request_id)

    def _error(self, logits: Tensor, request: SamplePlace, status: int) -> RequestError:
        name = f"request {request.request_id}"
        # Logits that were all -inf as the model made them are the model's failure, not a ban's.
        if status == NOT_FINITE or bool(logits.amax() == float("-inf")):
            text = f"{name}: the model's logits are not finite after {request.num_tokens} tokens"
            return failed_row("not_finite", text)
        fix = (
            "lower min_tokens"
            if request.sampling.constraint is None
            else "its constraint allows none that its other settings do"
        )
        text = f"{name}: no token is left to choose from: {fix}"
        return failed_row("no_token_left", text)

    def _samples(
        self,
        logits: Tensor,
        requests: Sequence[SamplePlace],
        token_ids: NDArray[np.int64],
        errors: dict[int, RequestError],
    ) -> dict[int, Sample]:
        ids = token_ids.tolist()
        good = [row for row in range(len(requests)) if row not in errors]
        samples = {row: Sample(ids[row]) for row in good}
        needed = [
            LogprobsRequest(row, ids[row], count)
            for row in good
            if (count := requests[row].sampling.logprobs) is not None
        ]
        if needed:
            scored = logprobs(logits, needed, self._row_ops.rank)
            for one, figures in zip(needed, scored, strict=True):
                samples[one.row] = Sample(one.token_id, *figures)
        return samples
