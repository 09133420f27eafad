"""Samples a token per row, independent of the batch; a row without a token fails alone.

Order: penalties, bias, bans, constraint masks, then `picking`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster_worker.engine.ports import Sample, failed_row
from pdcluster_worker.engine.request import SamplePlace
from pdcluster_worker.errors import RequestError
from pdcluster_worker.model.sampling.logprobs import LogprobsRequest, Rank, logprobs, rank_tokens
from pdcluster_worker.model.sampling.penalties import PenaltyState
from pdcluster_worker.model.sampling.picking import NOT_FINITE, PICKED, Picks, pick_tokens
from pdcluster_worker.model.sampling.rows import Rows, plan_rows
from pdcluster_worker.structured_output.masks import Masks

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
        """Unknown ids are a no-op."""
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
