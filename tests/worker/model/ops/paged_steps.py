"""Steps over a paged cache, small and ragged, whose every slot beyond a context is NaN, so that a
stray read shows.
"""

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdcluster_worker.model.ops.operations import AttentionShape, HeadNorms, Norm, Rotation
from pdcluster_worker.model.step_plan import NO_SLOT, StepPlan, padded_rows

LAYERS = 2
LAYER = 1


@dataclass(frozen=True)
class Heads:
    """Query heads, KV heads, head size and block size; half: pairs that are rotated."""

    query: int
    kv: int
    dim: int
    block_size: int
    half: int

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.query, self.kv, self.dim, 1 / math.sqrt(self.dim))

    @property
    def width(self) -> int:
        return (self.query + 2 * self.kv) * self.dim


@dataclass
class Step:
    """A plan, the cache before it and its rows."""

    heads: Heads
    plan: StepPlan
    cache: Tensor
    qkv: Tensor
    rotation: Rotation
    norms: HeadNorms


def make_step(
    heads: Heads,
    sequences: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    window: int | None = None,
) -> Step:
    """sequences: (context, rows) of each, decodes first; contexts are stored already, rows
    included.

    What lies before every window is NaN, and blocks that lie there have ids of no block.
    The tensors are the caller's own.
    """
    return copy.deepcopy(_made(heads, tuple(sequences), dtype, window))


@functools.cache
def _made(
    heads: Heads, sequences: tuple[tuple[int, int], ...], dtype: torch.dtype, window: int | None
) -> Step:
    generator = torch.Generator().manual_seed(3)
    plan = make_plan(heads.block_size, sequences, generator)
    num_blocks = int(plan.tables.max()) + 2
    cache = torch.full(
        (num_blocks, heads.kv, LAYERS, 2, heads.block_size, heads.dim), math.nan, dtype=dtype
    )
    for (context, rows), table_row in zip(sequences, plan.table_rows, strict=True):
        table, start = plan.tables[table_row], max(0, context - rows + 1 - (window or context))
        table[: start // heads.block_size] = -1000
        for position in range(start, context):
            values = torch.randn(heads.kv, LAYERS, 2, heads.dim, generator=generator)
            cache[
                int(table[position // heads.block_size]), :, :, :, position % heads.block_size
            ] = values.to(dtype)
    rows = len(plan.slots)
    qkv = torch.randn(rows, heads.width, generator=generator).to(dtype)
    cosine, sine = (
        torch.rand(rows, heads.half, generator=generator).to(dtype).float() for _ in range(2)
    )
    query, key = (torch.rand(heads.dim, generator=generator) + 0.5 for _ in range(2))
    return Step(
        heads,
        plan,
        cache,
        qkv,
        Rotation(cosine, sine),
        HeadNorms(Norm(query, 1e-6), Norm(key, 1e-5, rounds_first=False)),
    )


def make_plan(
    block_size: int, sequences: Sequence[tuple[int, int]], generator: torch.Generator
) -> StepPlan:
    """A plan with shuffled blocks and seats; ids beyond a context name no block."""
    needed = [-(-context // block_size) for context, _ in sequences]
    ids = iter(torch.randperm(sum(needed), generator=generator).tolist())
    table_rows = torch.randperm(len(sequences), generator=generator).int()
    tables = torch.full((len(sequences), max(needed) + 3), -1000, dtype=torch.int32)
    firsts: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for (context, rows), count, table_row in zip(
        sequences, needed, table_rows.tolist(), strict=True
    ):
        tables[table_row, :count] = torch.tensor([next(ids) for _ in range(count)])
        firsts.append(len(slots))
        for position in range(context - rows, context):
            positions.append(position)
            slots.append(
                int(tables[table_row, position // block_size]) * block_size + position % block_size
            )
    lengths = [rows for _, rows in sequences]
    padding = [0] * (padded_rows(len(slots)) - len(slots))
    return StepPlan(
        num_tokens=len(slots),
        num_decodes=lengths.count(1),
        longest=max(context for context, _ in sequences),
        token_ids=torch.zeros(len(slots) + len(padding), dtype=torch.long),
        positions=torch.tensor(positions + padding),
        slots=torch.tensor(slots + [NO_SLOT for _ in padding]),
        firsts=torch.tensor(firsts, dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        contexts=torch.tensor([context for context, _ in sequences], dtype=torch.int32),
        table_rows=table_rows,
        tables=tables,
        sample_at=torch.tensor([0]),
    )


def part_of(step: Step, index: int, first: int, last: int) -> Step:
    """A step with the rows [first, last) of sequence `index` alone, over the same cache."""
    plan = step.plan
    start = int(plan.firsts[index])
    rows = slice(start + first, start + last)
    left = int(plan.lengths[index]) - last
    one = replace(
        plan,
        num_tokens=last - first,
        num_decodes=int(last - first == 1),
        token_ids=plan.token_ids[rows],
        positions=plan.positions[rows],
        slots=plan.slots[rows],
        firsts=torch.zeros(1, dtype=torch.int32),
        lengths=torch.tensor([last - first], dtype=torch.int32),
        contexts=plan.contexts[index : index + 1] - left,
        table_rows=plan.table_rows[index : index + 1].clone(),
    )
    return replace(step, plan=one, qkv=step.qkv[rows].contiguous())
