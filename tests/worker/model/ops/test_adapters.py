"""LoRA adapters of products: the kernels give what plain torch gives, and the reference what merged
weights give; a row's bits depend neither on other rows nor on threads, and rows without an adapter
stay as they are.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pdcluster_worker.model.ops.adapters import AdaptedProduct, LayerAdapters, LowRank, ProductParts
from pdcluster_worker.model.ops.operations import Layers, Operations
from pdcluster_worker.model.ops.reference import Reference
from pdcluster_worker.model.step_plan import StepPlan
from tests.worker.model.ops.layer_steps import HEADS, INNER, STEPS, WIDTH, make_layers, rows_of
from tests.worker.model.ops.paged_steps import Case, stored_step

CLOSE = {torch.bfloat16: 3e-2, torch.float32: 1e-5}
DEPTH, COLUMNS, ROWS = 96, 104, 23  # columns of two projections, whole panels and a part
RANKS = ((3, 16), (40, None), (None, 17), (1, 2))


def parts_of(dtype: torch.dtype, depth: int = DEPTH, sizes: Sequence[int] = (64, 40)):
    """Four adapters of other ranks, some of which leave a projection as it is."""
    random = torch.Generator().manual_seed(3)

    def part(rank: int | None, size: int, first: int) -> LowRank | None:
        if rank is None:
            return None
        a = torch.randn(rank, depth, generator=random) / math.sqrt(depth)
        b = torch.randn(size, rank, generator=random) / math.sqrt(rank)
        return LowRank(a.to(dtype), b.to(dtype), 1.0 + rank / 7, first)

    firsts = [sum(sizes[:at]) for at in range(len(sizes))]
    return [[part(*given) for given in zip(ranks, sizes, firsts, strict=False)] for ranks in RANKS]


def adapted_plan(adapters: Sequence[int | None]) -> StepPlan:
    """adapters: of each row."""
    step = stored_step(HEADS, [(5, 1)], torch.float32)
    return with_rows(replace(step.plan, num_tokens=len(adapters)), adapters)


def with_rows(plan: StepPlan, adapters: Sequence[int | None]) -> StepPlan:
    present = sorted({each for each in adapters if each is not None})
    rows = [[at for at, each in enumerate(adapters) if each == index] for index in present]
    return replace(
        plan,
        adapter_rows=torch.tensor([row for each in rows for row in each]),
        adapter_runs=torch.tensor(
            [(index, len(each)) for index, each in zip(present, rows, strict=True)],
            dtype=torch.int32,
        ),
    )


MIXED = [None, 0, 1, 0, 2, None, 3, 1, 1, 1, 1, 1, 0, 2, 3, 3, None, 2, 2, 2, 2, 2, 0]


def random_rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(9)
    x, out = (torch.randn(ROWS, size, generator=random) for size in (DEPTH, COLUMNS))
    return x.to(dtype), out.to(dtype)


def adapted(
    ops: Operations, parts: Sequence[ProductParts], adapters: Sequence[int | None], dtype
) -> Tensor:
    x, out = random_rows(dtype)
    ops.adapt(x, out, adapted_plan(adapters), packed(ops, parts, COLUMNS))
    return out


def packed(ops: Operations, parts: Sequence[ProductParts], columns: int):
    """Each adapter in memory of its own."""
    return ops.join_adapters(
        [each for part in parts for each in ops.pack_adapter([AdaptedProduct(part, columns)])]
    )


@pytest.fixture
def reference(dtype):
    step = stored_step(HEADS, [(5, 1)], dtype)
    return Reference(step.cache, HEADS.shape)


def test_the_reference_adds_what_merged_weights_do(reference, dtype):
    x, plain = random_rows(dtype)
    found = adapted(reference, parts_of(dtype), MIXED, dtype)
    for row, index in enumerate(MIXED):
        merged = torch.zeros(COLUMNS, DEPTH)
        for part in [] if index is None else parts_of(dtype)[index]:
            if part is not None:
                columns = slice(part.first, part.first + len(part.b))
                merged[columns] += part.scale * (part.b.float() @ part.a.float())
        right = plain[row].float() + merged @ x[row].float()
        torch.testing.assert_close(found[row].float(), right, atol=CLOSE[dtype], rtol=CLOSE[dtype])


def test_kernels_add_what_the_reference_does(reference, dtype, make_cpu, each_thread_count):
    ops = make_cpu(stored_step(HEADS, [(5, 1)], dtype))
    right = adapted(reference, parts_of(dtype), MIXED, dtype)
    _, plain = random_rows(dtype)
    first = None
    for _ in each_thread_count():
        found = adapted(ops, parts_of(dtype), MIXED, dtype)
        torch.testing.assert_close(found, right, atol=CLOSE[dtype], rtol=CLOSE[dtype])
        base = [row for row, index in enumerate(MIXED) if index is None]
        assert torch.equal(found[base], plain[base])
        first = found if first is None else first
        assert torch.equal(found, first)


def test_a_row_has_the_same_bits_alone(dtype, make_cpu):
    ops = make_cpu(stored_step(HEADS, [(5, 1)], dtype))
    together = adapted(ops, parts_of(dtype), MIXED, dtype)
    for row in range(ROWS):
        alone = [index if at == row else None for at, index in enumerate(MIXED)]
        if MIXED[row] is not None:
            assert torch.equal(adapted(ops, parts_of(dtype), alone, dtype)[row], together[row])


def test_adapters_that_leave_a_product_as_it_is_add_nothing(dtype, make_cpu):
    ops = make_cpu(stored_step(HEADS, [(5, 1)], dtype))
    _, plain = random_rows(dtype)
    assert torch.equal(adapted(ops, [[None, None]] * 4, MIXED, dtype), plain)


def test_a_place_without_an_adapter_changes_nothing_for_the_others(dtype, make_cpu, reference):
    parts = parts_of(dtype)
    for ops in (make_cpu(stored_step(HEADS, [(5, 1)], dtype)), reference):
        x, out = random_rows(dtype)
        places = [
            each for part in parts for each in ops.pack_adapter([AdaptedProduct(part, COLUMNS)])
        ]
        ops.adapt(x, out, adapted_plan(MIXED), ops.join_adapters(places))
        rows = [None if index == 1 else index for index in MIXED]
        x, left = random_rows(dtype)
        places[1] = None
        ops.adapt(x, left, adapted_plan(rows), ops.join_adapters(places))
        others = [row for row, index in enumerate(MIXED) if index != 1]
        assert torch.equal(left[others], out[others])


def adapted_layers(ops: Operations, step, dtype: torch.dtype, depth=WIDTH, inner=INNER) -> Layers:
    heads = HEADS.num_heads * HEADS.head_dim
    keys = HEADS.num_kv_heads * HEADS.head_dim

    def product(depth: int, *sizes: int):
        return packed(ops, parts_of(dtype, depth, sizes), sum(sizes))

    products = LayerAdapters(
        product(depth, heads, keys, keys),
        product(heads, depth),
        product(depth, inner, inner),
        product(inner, depth),
    )
    plain = make_layers(ops, step, dtype, depth, inner)
    one, other = plain.each
    return Layers([replace(one, adapted=products), other], plain.activation)


def adapted_step(name: str, dtype: torch.dtype, heads: Case = HEADS):
    """A step whose sequences are of adapters in turns, and every fifth one of none."""
    step = stored_step(heads, STEPS[name], dtype)
    rows = []
    for at, (_, length) in enumerate(STEPS[name]):
        rows += [(None if at % 5 == 4 else at % 4)] * length
    return replace(step, plan=with_rows(step.plan, rows))


@pytest.mark.parametrize("name", list(STEPS))
def test_layers_by_one_call_have_the_bits_of_layer_by_layer(
    name, dtype, make_cpu, each_thread_count
):
    step = adapted_step(name, dtype)
    alone = replace(step, cache=step.cache.clone())
    ops, fine = make_cpu(step), make_cpu(alone)
    layers = adapted_layers(ops, step, dtype)
    expected = rows_of(step, dtype)
    Operations.run_layers(fine, expected, step.plan, layers, step.rotation)
    for _ in each_thread_count():
        hidden = rows_of(step, dtype)
        ops.run_layers(hidden, step.plan, layers, step.rotation)
        assert torch.equal(hidden, expected)
        assert torch.equal(step.cache.nan_to_num(), alone.cache.nan_to_num())


def test_layers_whose_rows_need_padding_are_adapted_too(dtype, make_cpu):
    step = adapted_step("decodes", dtype)
    ops = make_cpu(step)
    reference = Reference(step.cache.clone(), HEADS.shape)
    found, right = rows_of(step, dtype, 40), rows_of(step, dtype, 40)
    ops.run_layers(found, step.plan, adapted_layers(ops, step, dtype, 40, 24), step.rotation)
    layers = adapted_layers(reference, step, dtype, 40, 24)
    reference.run_layers(right, step.plan, layers, step.rotation)
    rows = step.plan.num_tokens
    close = {torch.bfloat16: 2e-1, torch.float32: 1e-3}[dtype]
    torch.testing.assert_close(found[:rows], right[:rows], atol=close, rtol=close)


def test_a_step_without_adapters_has_the_bits_of_a_model_without(dtype, make_cpu):
    step = stored_step(HEADS, STEPS["decodes and chunks"], dtype)
    ops = make_cpu(step)
    found, right = rows_of(step, dtype), rows_of(step, dtype)
    ops.run_layers(found, step.plan, adapted_layers(ops, step, dtype), step.rotation)
    ops.run_layers(right, step.plan, make_layers(ops, step, dtype), step.rotation)
    assert torch.equal(found, right)
