"""CUDA graphs of decode steps, one per padded number of sequences; other steps run eagerly."""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pdcluster_worker.model.ops.operations import Forward
from pdcluster_worker.model.step_plan import (
    NO_SLOT,
    StepLimits,
    StepPlan,
    read_plan,
    row_sizes,
    write_plan,
)

logger = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # its classes have no types


class PlanCopy:
    """A host buffer is reused after its transfer, which waits for the step with the old plan."""

    def __init__(self, device: torch.device, limits: StepLimits) -> None:
        num_bytes = limits.plan_bytes
        self._block_size = limits.block_size
        self._is_cuda = device.type == "cuda"
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._hosts = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(2)
        ]
        self._copied = [_cuda.Event() for _ in range(2)] if self._is_cuda else []
        self._turn = 0

    def place(self, plan: StepPlan) -> StepPlan:
        """One transfer, to fixed addresses for CUDA graphs; valid until the next call."""
        self._turn = 1 - self._turn
        host = self._hosts[self._turn]
        if self._is_cuda:
            self._copied[self._turn].synchronize()
        sizes = write_plan(plan, host, self._block_size)
        self._device[: sizes.num_bytes].copy_(host[: sizes.num_bytes], non_blocking=True)
        if self._is_cuda:
            self._copied[self._turn].record()
        return replace(read_plan(self._device, sizes), adapter_runs=plan.adapter_runs)


def pad_decodes(plan: StepPlan) -> StepPlan:
    """A plan of decodes, each padding row a sequence with context 0, every row sampled."""
    size = len(plan.token_ids)
    more = size - plan.num_tokens
    every_row = torch.arange(size)
    return replace(
        plan,
        num_tokens=size,
        num_decodes=size,
        firsts=torch.cat((plan.firsts, every_row[plan.num_tokens :].int())),
        lengths=torch.cat((plan.lengths, torch.ones(more, dtype=torch.int32))),
        contexts=torch.cat((plan.contexts, torch.zeros(more, dtype=torch.int32))),
        table_rows=torch.cat((plan.table_rows, torch.zeros(more, dtype=torch.int32))),
        sample_at=every_row,
    )


def graph_for(plan: StepPlan, captured: Collection[int]) -> int | None:
    """Size of the graph for this plan; None = run eagerly."""
    size = len(plan.token_ids)
    decodes = plan.num_decodes == plan.num_tokens and not len(plan.adapter_runs)
    return size if decodes and size in captured else None


def example_plan(size: int, longest: int) -> StepPlan:
    """A plan of padding rows only: nothing is stored or read."""
    rows, none = torch.zeros(size, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    slots, tables = torch.full_like(rows, NO_SLOT), torch.zeros(1, longest, dtype=torch.int32)
    return pad_decodes(
        StepPlan(0, 0, longest, rows, rows, slots, none, none, none, none, tables, rows)
    )


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
        # logits: [size, vocab_size], overwritten by each replay
        self._captured: dict[int, tuple[Any, Tensor]] = {}

    @torch.inference_mode()
    def capture(self, max_sequences: int) -> None:
        """Raises what torch raises where an operation cannot be captured."""
        pool = torch.cuda.graph_pool_handle()
        side = _cuda.Stream()  # one for all: cuBLAS keeps a workspace for each stream
        for size in reversed(row_sizes(max_sequences)):  # smaller ones reuse the pool
            plan = self._copy.place(example_plan(size, self._longest))
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._forward(plan)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                logits = self._forward(plan)
            self._captured[size] = graph, logits
        logger.info("captured decode graphs sizes=%s", ",".join(map(str, sorted(self._captured))))

    def logits(self, plan: StepPlan) -> Tensor:
        """Logits [R, vocab_size] of a plan on the host; valid until the next call."""
        size = graph_for(plan, self._captured)
        if size is None:
            self._begin(plan)
            return self._forward(self._copy.place(plan))
        self._copy.place(pad_decodes(plan))
        graph, logits = self._captured[size]
        graph.replay()
        if len(plan.sample_at) == size:
            return logits
        return logits[plan.sample_at.to(logits.device)]
