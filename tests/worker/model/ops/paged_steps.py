"""Steps over a paged cache, small and ragged: any implementation against `Reference`, on any
device.

Every slot of the cache that no row may read holds NaN, so that a stray read shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdcluster_worker.config.engine import KvCacheDtype
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.kv_size import cache_tensor, stored_kv
from pdcluster_worker.model.loading.loader import stored_in
from pdcluster_worker.model.ops.operations import AttentionShape, HeadNorms, Norm, Rotation
from pdcluster_worker.model.ops.stored_kv import StoredKV, quantize
from pdcluster_worker.model.step_plan import NO_SLOT, StepPlan, padded_rows

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
    is_stored: bool = False  # keys and values of the step's own rows are in the cache

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5)

    @property
    def width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


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
    Case(
        "a window longer than a chunk",
        ((90, 9), (120, 76)),
        num_heads=2,
        num_kv_heads=1,
        window=70,
    ),
    Case("a window of one", ((30, 1), (40, 25)), num_heads=3, num_kv_heads=1, window=1),
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


STORED_CASES = [
    case
    for case in BOTH
    if case.name
    in (
        "decodes up to and over a block and a split",
        "a head that is no power of two",
        "decodes and chunks of other lengths",
        "windows in chunks",
    )
]
"""For caches that are quantized."""


@dataclass
class Step:
    """The tensors of a case, on the CPU.  cache: NaN wherever no row may read."""

    case: Case
    plan: StepPlan
    cache: Tensor | StoredKV
    qkv: Tensor
    rotation: Rotation
    norms: HeadNorms | None


def label(case: Case) -> str:
    return f"{case.name}, {str(case.dtype).removeprefix('torch.')}"


def stored_step(
    heads: Case,
    sequences: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    window: int | None = None,
) -> Step:
    """A padded step with its rows in the cache, and norms that round differently."""
    num_tokens = sum(rows for _, rows in sequences)
    step = make_step(
        replace(
            heads,
            sequences=tuple(sequences),
            padding=padded_rows(num_tokens) - num_tokens,
            epsilon=1e-6,
            dtype=dtype,
            window=window,
            is_stored=True,
        )
    )
    assert step.norms is not None
    key = Norm(step.norms.key.weight, 1e-5, rounds_first=False)
    return replace(step, norms=HeadNorms(step.norms.query, key))


def make_step(case: Case, seed: int = 0) -> Step:
    """Random keys and values of every context before the step, in shuffled blocks.

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
        places = torch.arange(start, context if case.is_stored else context - rows)
        blocks = plan.tables[table_row, places // case.block_size].long()
        values = torch.randn(
            len(places), case.num_kv_heads, LAYERS, 2, case.head_dim, generator=random
        )
        cache[blocks, :, :, :, places % case.block_size] = values.to(case.dtype)
    qkv = torch.randn(len(plan.token_ids), case.width, generator=random).to(case.dtype)
    return Step(case, plan, cache, qkv, make_rotation(case, plan), make_norms(case, random))


STORED: list[KvCacheDtype] = ["int8", "fp8_e4m3", "bf16"]
"""Dtypes that keys and values are stored in (bf16: those that are computed in float32)."""


def stored_as(step: Step, kind: KvCacheDtype) -> Step:
    """The same step over a cache of this kind, in a worker's layout; scales of unread slots are
    NaN.
    """
    case, plain = step.case, step.cache
    assert isinstance(plain, Tensor)
    computed = str(case.dtype).removeprefix("torch.")
    geometry = stored_in(
        KVGeometry(case.num_kv_heads, case.head_dim, LAYERS, case.block_size, computed), kind
    )
    dtype, shape = cache_tensor(geometry, len(plain))
    stored = stored_kv(torch.zeros(shape, dtype=dtype), geometry)
    if stored.scales is None:
        stored.rows.copy_(plain)
    else:
        rows, scales = quantize(plain, stored.rows.dtype)
        stored.rows.view(torch.int8).copy_(rows.view(torch.int8))
        stored.scales.copy_(scales)
    return replace(step, cache=stored)


def make_plan(case: Case, random: torch.Generator) -> StepPlan:
    """A plan with shuffled blocks and table rows; stale ids are of blocks whose slots are NaN."""
    contexts, lengths = (list(numbers) for numbers in zip(*case.sequences, strict=True))
    num_tokens, count = sum(lengths), len(lengths)
    needed = [-(-context // case.block_size) for context in contexts]
    tables = torch.full((count + 2, max(needed) + 1), sum(needed), dtype=torch.int32)
    blocks = torch.randperm(sum(needed), generator=random).int().split(needed)
    table_rows = torch.randperm(count + 2, generator=random)[:count].int()
    firsts = [sum(lengths[:index]) for index in range(count)]
    positions = torch.zeros(num_tokens + case.padding, dtype=torch.int64)
    slots = torch.full_like(positions, NO_SLOT)
    for index, table_row in enumerate(table_rows.tolist()):
        tables[table_row, : needed[index]] = blocks[index]
        places = torch.arange(contexts[index] - lengths[index], contexts[index])
        rows = slice(firsts[index], firsts[index] + lengths[index])
        positions[rows] = places
        ids = tables[table_row, places // case.block_size].long()
        slots[rows] = ids * case.block_size + places % case.block_size
    return StepPlan(
        num_tokens=num_tokens,
        num_decodes=lengths.count(1),
        longest=max(contexts),
        token_ids=torch.arange(len(slots)),
        positions=positions,
        slots=slots,
        firsts=_int(firsts),
        lengths=_int(lengths),
        contexts=_int(contexts),
        table_rows=table_rows,
        tables=tables,
        sample_at=_int(firsts).long() + _int(lengths) - 1,
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
        longest=int(plan.contexts[index]) - left,
        token_ids=plan.token_ids[rows],
        positions=plan.positions[rows],
        slots=plan.slots[rows],
        firsts=_int([0]),
        lengths=_int([last - first]),
        contexts=plan.contexts[index : index + 1] - left,
        table_rows=plan.table_rows[index : index + 1].clone(),
        sample_at=torch.tensor([last - first - 1]),
    )
    rotation = Rotation(step.rotation.cosine[rows], step.rotation.sine[rows])
    return replace(step, plan=one, qkv=step.qkv[rows].contiguous(), rotation=rotation)


def _int(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
