"""Copies the plan of a step to a device in one transfer, at fixed addresses for CUDA graphs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdcluster_worker.model.ops.step_limits import StepLimits
from pdcluster_worker.model.step_plan import StepPlan

_cuda: Any = torch.cuda  # its classes have no types

_NARROW = ("firsts", "lengths", "contexts", "table_rows")
_WIDE = ("token_ids", "positions", "slots", "sample_at")


@dataclass(frozen=True, slots=True)
class _Part:
    """`count` elements from byte `start` on."""

    name: str
    start: int
    count: int
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + self.count * self.dtype.itemsize

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.end].view(self.dtype)


def layout(plan: StepPlan, width: int) -> list[_Part]:
    """width: blocks of each sequence's table, which comes last."""
    return list(_layout(plan, width))


def _layout(plan: StepPlan, width: int) -> Iterator[_Part]:
    start = 0
    sizes = [(name, len(getattr(plan, name)), torch.int64) for name in _WIDE]
    sizes += [(name, len(getattr(plan, name)), torch.int32) for name in _NARROW]
    sizes.append(("tables", len(plan.table_rows) * width, torch.int32))
    for name, count, dtype in sizes:
        part = _Part(name, start, count, dtype)
        yield part
        start = part.end


class PlanCopy:
    """A host buffer is reused after its transfer, which waits for the step with the old plan."""

    def __init__(self, device: torch.device, limits: StepLimits) -> None:
        # Each row may be sampled: a prompt's log probabilities are of all of its rows.
        numbers = 8 * 4 * limits.rows, 4 * (4 + limits.blocks) * limits.sequences
        num_bytes = sum(numbers)
        self._block_size = limits.block_size
        self._is_cuda = device.type == "cuda"
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._hosts = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(2)
        ]
        self._copied = [_cuda.Event() for _ in range(2)] if self._is_cuda else []
        self._turn = 0

    def place(self, plan: StepPlan) -> StepPlan:
        """Valid until the next call; in `tables[table_row]` blocks of other sequences follow."""
        width = -(-plan.longest // self._block_size)
        parts = layout(plan, width)
        self._turn = 1 - self._turn
        host = self._hosts[self._turn]
        if self._is_cuda:
            self._copied[self._turn].synchronize()
        for part in parts:
            _fill(part.of(host).numpy(), part.name, plan, width)
        num_bytes = parts[-1].end
        self._device[:num_bytes].copy_(host[:num_bytes], non_blocking=True)
        if self._is_cuda:
            self._copied[self._turn].record()
        arrays: dict[str, Any] = {part.name: part.of(self._device) for part in parts}
        # Windows over the packed tables: one for each place that a sequence's blocks may start at.
        num_windows = (len(plan.table_rows) - 1) * width + 1
        arrays["tables"] = arrays["tables"].as_strided((num_windows, width), (1, 1))
        return replace(plan, **arrays)


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
        table_rows=torch.cat((plan.table_rows, plan.table_rows[:1].expand(more))),
        sample_at=every_row,
    )


def _fill(
    target: "np.ndarray[tuple[int], np.dtype[np.int64 | np.int32]]",
    name: str,
    plan: StepPlan,
    width: int,
) -> None:
    if name == "table_rows":
        target[:] = np.arange(len(plan.table_rows), dtype=np.int32) * width
    elif name == "tables":
        tables = plan.tables[:, :width].numpy()
        np.take(tables, plan.table_rows.numpy(), axis=0, out=target.reshape(-1, width), mode="clip")
    else:
        target[:] = getattr(plan, name).numpy()
