"""A step over all ranks, as rank 0 runs it; pipeline stages work on micro-batches."""

from typing import Any

import torch
from torch import Tensor

from pdcluster_worker.model.decoder import Decoder
from pdcluster_worker.model.parallel.group import RankGroup
from pdcluster_worker.model.parallel.plan_parts import plan_parts
from pdcluster_worker.model.parallel.ranks import RankProcesses
from pdcluster_worker.model.step_plan import StepPlan


class ParallelForward:
    """A `Forward`.  decoder: rank 0's part."""

    def __init__(self, decoder: Decoder, ranks: RankProcesses, group: RankGroup) -> None:
        self.operations = decoder.operations
        self.code = decoder.code
        self._decoder = decoder
        self._ranks = ranks
        self._group = group

    def logits(self, plan: StepPlan) -> Tensor:
        """Raises EngineBrokenError for any failure: other ranks have begun, so no retry."""
        parts = plan_parts(plan, self._ranks.place.pipeline_size)
        try:
            made = [self._part(part, slot) for slot, part in enumerate(parts)]
            logits = [self._arrived(rows, work) for rows, work in made]
            self._ranks.wait(len(parts))
        except Exception as e:
            raise self._ranks.explain(e) from e
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def warm_up(self, num_rows: int) -> None:
        self._ranks.warm_up(num_rows)
        self._decoder.warm_up(num_rows)
        self._ranks.wait()

    def close(self) -> None:
        self._ranks.close()
        self._group.close()

    def _part(self, plan: StepPlan, slot: int) -> tuple[Tensor, Any]:
        """Logits of a micro-batch, or the tensor and the pending receive."""
        self._ranks.step(plan, slot)
        if self._ranks.place.is_last:
            return self._decoder.logits(plan), None
        rows = self._decoder.empty_logits(len(plan.sample_at))
        work = self._group.expect_logits(rows) if len(rows) else None
        self._decoder.logits(plan)
        return rows, work

    def _arrived(self, rows: Tensor, work: Any) -> Tensor:
        if work is not None:
            self._group.wait(work)
        return rows
