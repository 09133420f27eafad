"""CUDA graphs of decode steps, one per padded number of sequences; other steps run eagerly."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdcluster_worker.model.ops.operations import Forward
from pdcluster_worker.model.ops.plan_copy import PlanCopy, pad_decodes
from pdcluster_worker.model.step_plan import NO_SLOT, StepPlan, row_sizes

logger = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # its classes have no types


def graph_sizes(max_sequences: int) -> list[int]:
    """Largest first: the smaller graphs reuse its memory pool."""
    return row_sizes(max_sequences)[::-1]


def graph_for(plan: StepPlan, captured: Collection[int]) -> int | None:
    """Size of the graph for this plan; None = run eagerly."""
    size = len(plan.token_ids)
    return size if plan.num_decodes == plan.num_tokens and size in captured else None


def example_plan(size: int, longest: int) -> StepPlan:
    """A plan of padding rows only: nothing is stored or read."""
    rows = torch.arange(size)
    zeros, narrow = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int32)
    return StepPlan(
        num_tokens=size,
        num_decodes=size,
        longest=longest,
        token_ids=zeros,
        positions=zeros,
        slots=torch.full((size,), NO_SLOT),
        firsts=rows.int(),
        lengths=torch.ones_like(narrow),
        contexts=narrow,
        table_rows=narrow,
        tables=torch.zeros(1, longest, dtype=torch.int32),
        sample_at=rows,
    )


@dataclass(frozen=True, slots=True)
class _Captured:
    """logits: [size, vocab_size], overwritten by each replay."""

    graph: Any
    logits: Tensor


class Graphs:
    """Each size runs once before it is captured: a capture cannot compile kernels."""

    def __init__(
        self, copy: PlanCopy, forward: Forward, begin: Callable[[StepPlan], None], *, longest: int
    ) -> None:
        """begin: called before an eager step; longest: tokens of the longest context."""
        self._begin = begin
        self._copy = copy
        self._forward = forward
        self._longest = longest
        self._captured: dict[int, _Captured] = {}

    @torch.inference_mode()
    def capture(self, max_sequences: int) -> None:
        """Raises what torch raises where an operation cannot be captured."""
        pool = torch.cuda.graph_pool_handle()
        side = _cuda.Stream()  # one for all: cuBLAS keeps a workspace for each stream
        for size in graph_sizes(max_sequences):
            plan = self._copy.place(example_plan(size, self._longest))
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._forward(plan)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                logits = self._forward(plan)
            self._captured[size] = _Captured(graph, logits)
        logger.info("captured decode graphs sizes=%s", ",".join(map(str, sorted(self._captured))))

    def logits(self, plan: StepPlan) -> Tensor:
        """Logits [R, vocab_size] of a plan on the host; valid until the next call."""
        size = graph_for(plan, self._captured)
        if size is None:
            self._begin(plan)
            return self._forward(self._copy.place(plan))
        self._copy.place(pad_decodes(plan))
        captured = self._captured[size]
        captured.graph.replay()
        if len(plan.sample_at) == size:
            return captured.logits
        return captured.logits[plan.sample_at.to(captured.logits.device)]
