"""Log probabilities of prompt tokens; a step with many such rows runs in parts to bound memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdcluster_worker.engine.ports import RowOutcome, Sample, failed_row
from pdcluster_worker.engine.request import Batch, EngineRequest
from pdcluster_worker.messages.requests import PromptLogprob
from pdcluster_worker.model.decoder import Forward
from pdcluster_worker.model.sampling.sampler import LogprobsRequest, RowOperations, logprobs
from pdcluster_worker.model.step_plan import StepPlan, plan_parts

# rows whose logits are held at once: 156 MB with 152k tokens, and enough for fast products
MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row of a step, and the position of the prompt token that its logits predict."""

    row: int
    request: EngineRequest
    position: int


def prompt_rows(batch: Batch) -> list[PromptRow]:
    rows: list[PromptRow] = []
    first = 0
    for item in batch.items:
        request = item.request
        if request.scores_prompt:
            last = min(item.end, request.num_prompt_tokens - 1)
            rows += [
                PromptRow(first + at - item.start, request, at + 1)
                for at in range(item.start, last)
            ]
        first += item.num_tokens
    return rows


class PromptLogprobs:
    """Log probabilities of live requests' prompts, by position."""

    def __init__(self, row_ops: RowOperations) -> None:
        self._row_ops = row_ops
        self._kept: dict[str, dict[int, PromptLogprob]] = {}

    def logits(self, forward: Forward, plan: StepPlan, rows: Sequence[PromptRow]) -> Tensor:
        """Logits of the plan's sampled rows; prompt rows are scored and kept."""
        by_row = {row.row: row for row in rows}
        needed = torch.tensor(sorted([*plan.sample_at.tolist(), *by_row]))
        count = 1 if len(needed) <= MOST_ROWS else -(-plan.num_tokens // MOST_ROWS)
        sampled: list[Tensor] = []
        first = 0
        for part in plan_parts(replace(plan, sample_at=needed), count):
            # they hold until the next part
            logits = self._row_ops.receive(forward.logits(part))
            places = [by_row.get(first + at) for at in part.sample_at.tolist()]
            self._keep(logits, places)
            others = [place for place, row in enumerate(places) if row is None]
            sampled.append(logits[_ids(others, logits.device)])
            first += part.num_tokens
        return torch.cat(sampled)

    def of(self, request: EngineRequest, outcome: RowOutcome) -> RowOutcome:
        """Adds the prompt's log probabilities; non-finite logits anywhere fail the request."""
        if not isinstance(outcome, Sample) or not request.scores_prompt:
            return outcome
        kept = self._kept.get(request.request_id, {})
        figures = tuple(kept[position] for position in range(1, request.num_prompt_tokens))
        bad = next(
            (position for position, one in enumerate(figures, start=1) if math.isnan(one.logprob)),
            None,
        )
        if bad is not None:
            return failed_row(
                "not_finite",
                f"request {request.request_id}: the model's logits are not finite after {bad} "
                "tokens",
            )
        return Sample(outcome.token_id, outcome.logprob, outcome.top_logprobs, figures)

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)

    def _keep(self, logits: Tensor, places: Sequence[PromptRow | None]) -> None:
        rows = [(place, row) for place, row in enumerate(places) if row is not None]
        if not rows:
            return
        needed = [
            LogprobsRequest(
                place, row.request.tokens[row.position], row.request.sampling.prompt_logprobs or 0
            )
            for place, row in rows
        ]
        at = _ids([one.row for one in needed], logits.device)
        chosen = logits[at, _ids([one.token_id for one in needed], logits.device)]
        ranks = (logits[at] > chosen[:, None]).sum(1) + 1
        figures = logprobs(logits, needed, self._row_ops.rank)
        for (_, row), rank, (logprob, top) in zip(rows, ranks.cpu().tolist(), figures, strict=True):
            kept = self._kept.setdefault(row.request.request_id, {})
            kept[row.position] = PromptLogprob(logprob, rank, list(top))


def _ids(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)
