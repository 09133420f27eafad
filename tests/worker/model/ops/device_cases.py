"""Cases of the operations that read a step's plan: any implementation against `Reference`, on any
device.

A case has a cache whose every slot that no row may read holds NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdcluster_worker.model.ops.operations import AttentionShape, HeadNorms, Norm, Rotation
from pdcluster_worker.model.step_plan import NO_SLOT, StepPlan

LAYERS, LAYER = 2, 1
SPARE_BLOCKS = 2


@dataclass(frozen=True)
class Case:
    """One step.  sequences: (context, rows) of each, decodes first.  padding: rows after them."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    padding: int = 0
    half: int | None = None  # None = the whole head is rotated
    epsilon: float | None = None  # None = heads have no norms
    rounds_first: bool = True
    dtype: torch.dtype = torch.float32
    window: int | None = None

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5)

    @property
    def longest(self) -> int:
        return max(context for context, _ in self.sequences)


CASES = [
    Case("one decode", ((5, 1),)),
    Case(
        "decodes up to and over a block and a split", ((1, 1), (4, 1), (256, 1), (257, 1), (300, 1))
    ),
    Case("decodes and padding", ((9, 1), (30, 1), (2, 1)), padding=5),
    Case("every head has its own keys", ((19, 1), (33, 6)), num_heads=2, head_dim=32),
    Case("one key head", ((19, 1), (33, 6)), num_heads=7, num_kv_heads=1),
    Case("a head that is no power of two", ((7, 1), (11, 3)), head_dim=24, block_size=8),
    Case("a fresh chunk", ((23, 23),)),
    Case("a chunk after its context", ((70, 21),), padding=3),
    Case(
        "decodes and chunks of other lengths",
        ((12, 1), (3, 1), (40, 25), (2, 2), (90, 9)),
        padding=4,
    ),
    Case("windows in decodes", ((3, 1), (40, 1), (300, 1), (500, 1)), window=37),
    Case("windows in chunks", ((12, 1), (23, 23), (110, 30), (90, 2)), padding=4, window=9),
    Case("a window longer than a chunk", ((90, 9), (120, 76)), window=70),
    Case("a window of one", ((30, 1), (40, 25)), window=1),
    Case("part of a head is rotated", ((6, 1), (9, 4)), half=4),
    Case("heads have norms", ((6, 1), (9, 4)), epsilon=1e-6, padding=2),
    Case(
        "heads have norms rounded last, part is rotated",
        ((6, 1), (9, 4)),
        epsilon=1e-5,
        rounds_first=False,
        half=6,
    ),
]

BOTH = [replace(case, dtype=dtype) for case in CASES for dtype in (torch.float32, torch.bfloat16)]

FEW = [
    case
    for case in BOTH
    if case.dtype == torch.float32 or case.name in ("decodes and padding", "heads have norms")
]
"""For where each takes a second."""


@dataclass
class Step:
    """The tensors of a case, on the CPU.  cache: NaN wherever no row may read."""

    plan: StepPlan
    cache: Tensor
    qkv: Tensor
    rotation: Rotation
    norms: HeadNorms | None


def label(case: Case) -> str:
    return f"{case.name}, {str(case.dtype).removeprefix('torch.')}"


def make_step(case: Case, seed: int = 0) -> Step:
    """Random keys and values of every context before the step, in shuffled blocks; the rows of the
    step are not stored yet.

    What lies before every window holds NaN, and blocks that lie there have stale ids.
    """
    random = torch.Generator().manual_seed(seed)
    plan = make_plan(case, random)
    num_blocks = int(plan.tables.max()) + 1 + SPARE_BLOCKS
    size = (num_blocks, case.num_kv_heads, LAYERS, 2, case.block_size, case.head_dim)
    cache = torch.full(size, float("nan"), dtype=case.dtype)
    for (context, rows), table_row in zip(case.sequences, plan.table_rows.tolist(), strict=True):
        start = 0 if case.window is None else max(0, context - rows + 1 - case.window)
        plan.tables[table_row, : start // case.block_size] = num_blocks - 1
        for place in range(start, context - rows):
            block = int(plan.tables[table_row, place // case.block_size])
            values = torch.randn(case.num_kv_heads, LAYERS, 2, case.head_dim, generator=random)
            cache[block, :, :, :, place % case.block_size] = values.to(case.dtype)
    total = len(plan.token_ids)
    qkv = torch.randn(
        total, (case.num_heads + 2 * case.num_kv_heads) * case.head_dim, generator=random
    )
    return Step(
        plan, cache, qkv.to(case.dtype), make_rotation(case, plan), make_norms(case, random)
    )


def make_plan(case: Case, random: torch.Generator) -> StepPlan:
    sequences = case.sequences
    lengths = [rows for _, rows in sequences]
    num_tokens, total = sum(lengths), sum(lengths) + case.padding
    needed = [-(-context // case.block_size) for context, _ in sequences]
    # stale ids name no block
    tables = torch.full((len(sequences) + 2, max(needed) + 1), 10**6, dtype=torch.int32)
    blocks = torch.randperm(sum(needed), generator=random).int()
    table_rows = torch.randperm(len(sequences) + 2, generator=random)[: len(sequences)].int()
    for table_row, count, ids in zip(
        table_rows.tolist(), needed, blocks.split(needed), strict=True
    ):
        tables[table_row, :count] = ids
    positions, slots = torch.zeros(total, dtype=torch.int64), torch.full((total,), NO_SLOT)
    firsts = [sum(lengths[:index]) for index in range(len(lengths))]
    for (context, rows), first, table_row in zip(
        sequences, firsts, table_rows.tolist(), strict=True
    ):
        places = torch.arange(context - rows, context)
        positions[first : first + rows] = places
        slots[first : first + rows] = (
            tables[table_row, places // case.block_size].long() * case.block_size
            + places % case.block_size
        )
    return StepPlan(
        num_tokens=num_tokens,
        num_decodes=lengths.count(1),
        longest=case.longest,
        token_ids=torch.arange(total),
        positions=positions,
        slots=slots,
        firsts=_int(firsts),
        lengths=_int(lengths),
        contexts=_int([context for context, _ in sequences]),
        table_rows=table_rows,
        tables=_mask_stale(tables),
        sample_at=torch.tensor(
            [first + rows - 1 for first, rows in zip(firsts, lengths, strict=True)]
        ),
    )


def make_rotation(case: Case, plan: StepPlan) -> Rotation:
    half = case.head_dim // 2 if case.half is None else case.half
    angles = plan.positions.unsqueeze(1) / 100 ** (torch.arange(half) / half)
    return Rotation(
        *(part.to(case.dtype).float().contiguous() for part in (angles.cos(), angles.sin()))
    )


def make_norms(case: Case, random: torch.Generator) -> HeadNorms | None:
    if case.epsilon is None:
        return None
    query, key = (torch.rand(case.head_dim, generator=random) + 0.5 for _ in range(2))
    return HeadNorms(
        Norm(query, case.epsilon, case.rounds_first), Norm(key, case.epsilon, case.rounds_first)
    )


def _int(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _mask_stale(tables: Tensor) -> Tensor:
    """Stale ids are of blocks that exist, whose slots are NaN."""
    known = int(tables[tables < 10**6].max())
    return torch.where(tables < 10**6, tables, torch.tensor(known + 1, dtype=torch.int32))
