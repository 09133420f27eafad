"""Shares of products and of a plan, without any process: put together they are the whole again."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pdcluster_worker.engine.request import Batch, EngineRequest, Scheduled
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.model.decoder_loader import split_inputs, split_outputs, split_vocabulary
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.memory import attach, reserve_shared
from pdcluster_worker.model.ops.adapters import adapter_rows
from pdcluster_worker.model.ops.operations import AttentionShape
from pdcluster_worker.model.parallel.control import PlanSlots
from pdcluster_worker.model.rank_layout import ParallelRank, check_divides
from pdcluster_worker.model.step_plan import (
    NO_ADAPTER,
    NO_SLOT,
    StepLimits,
    StepPlan,
    StepPlanner,
    padded_rows,
    plan_parts,
)

SIZES = st.sampled_from([1, 2, 4, 8])


def places(size: int) -> list[ParallelRank]:
    return [ParallelRank(tensor_size=size, rank=rank) for rank in range(size)]


@given(SIZES, st.integers(1, 4), st.booleans())
def test_shares_of_outputs_are_the_whole_in_order(size: int, heads: int, has_bias: bool) -> None:
    linear = nn.Linear(6, 8 * heads, bias=has_bias)
    shares = [split_outputs(linear, place) for place in places(size)]
    assert torch.equal(torch.cat([share.weight for share in shares]), linear.weight)
    biases = [share.bias for share in shares if share.bias is not None]
    assert (torch.equal(torch.cat(biases), linear.bias)) if has_bias else not biases


@given(SIZES, st.integers(1, 4), st.booleans())
def test_shares_of_inputs_sum_to_the_whole_product_with_one_bias(
    size: int, heads: int, has_bias: bool
) -> None:
    linear = nn.Linear(8 * heads, 6, bias=has_bias).double()
    x = torch.randn(3, 8 * heads, dtype=torch.float64)
    shares = [(split_inputs(linear, place), place.share(8 * heads)) for place in places(size)]
    parts = [nn.functional.linear(x[:, rows], share.weight, share.bias) for share, rows in shares]
    torch.testing.assert_close(torch.stack(parts).sum(0), linear(x))


@given(SIZES, st.integers(8, 40), st.booleans())
def test_shares_of_the_vocabulary_are_equally_large_and_the_whole_in_order(
    size: int, vocab_size: int, has_bias: bool
) -> None:
    linear = nn.Linear(4, vocab_size, bias=has_bias)
    shares = [split_vocabulary(linear, place) for place in places(size)]
    assert len({len(share.weight) for share in shares}) == 1
    assert torch.equal(torch.cat([share.weight for share in shares])[:vocab_size], linear.weight)
    assert [share.bias is not None for share in shares] == [has_bias] * size


@given(SIZES, st.sampled_from([1, 2, 4]), st.integers(4, 9))
def test_parts_of_the_cache_cover_each_byte_of_a_block_once(
    size: int, stages: int, num_layers: int
) -> None:
    geometry = KVGeometry(
        num_kv_heads=8, head_dim=4, num_layers=num_layers, block_size=2, dtype="float32"
    )
    cache = KVCache(geometry, 2)
    for rank in range(size * stages):
        cache.part(ParallelRank(size, stages, rank)).add_(rank + 1)
    heads, layers = (
        [8 // size] * size,
        [len(ParallelRank(1, stages, stage).layers(num_layers)) for stage in range(stages)],
    )
    expected = torch.arange(1, size * stages + 1).view(stages, size).T
    expected = expected.repeat_interleave(torch.tensor(heads), 0).repeat_interleave(
        torch.tensor(layers), 1
    )
    assert torch.equal(cache.tensor[1, :, :, 0, 0, 0], expected.float())
    assert torch.equal(cache.tensor.amin((3, 4, 5)), cache.tensor.amax((3, 4, 5)))


SHAPE = AttentionShape(num_heads=12, num_kv_heads=4, head_dim=16, scaling=1.0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_size_that_divides_is_taken(size: int) -> None:
    check_divides(ParallelRank(size, 2), SHAPE, {"intermediate size": 64}, 2)
    assert ParallelRank(size).shape(SHAPE) == AttentionShape(12 // size, 4 // size, 16, 1.0)


def test_a_size_that_does_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ModelError,
        match=r"tensorParallelSize of 8 .* KV heads \(4\), its attention heads \(12\): set it to "
        r"one of 1, 2, 4",
    ):
        check_divides(ParallelRank(8), SHAPE, {"intermediate size": 64}, 2)
    with pytest.raises(ModelError, match=r"its intermediate size \(63\): set it to one of 1$"):
        check_divides(ParallelRank(4), SHAPE, {"intermediate size": 63}, 2)


def test_more_stages_than_layers_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        ModelError,
        match=r"pipelineParallelSize of 4 is over this model's 3 layers.*: set it to 3 or less",
    ):
        check_divides(ParallelRank(1, 4), SHAPE, {"intermediate size": 64}, 3)


ADAPTERS = {"sql": 0, "fr": 1, "law": 2}
LIMITS = StepLimits(max_tokens=72, max_sequences=6, longest=64, block_size=4)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """A step of up to 6 requests: decodes and chunks at any place of their context."""
    items, num_blocks = [], 0
    for number in range(draw(st.integers(1, 6))):
        computed, count = draw(st.integers(0, 20)), draw(st.one_of(st.just(1), st.integers(1, 12)))
        known = computed + count + draw(st.integers(0, 2))
        blocks = -(-known // 4)
        table = list(range(num_blocks, num_blocks + blocks))
        num_blocks += blocks
        request = EngineRequest(
            f"r{number}",
            list(range(known)),
            known,
            SamplingParams(max_tokens=1, seed=0),
            block_table=table,
            adapter=draw(st.sampled_from(["", "", *ADAPTERS])),
        )
        request.num_computed_tokens = computed
        items.append(Scheduled.of(request, count))
    return StepPlanner(LIMITS, adapters=ADAPTERS).plan(Batch(tuple(items)))


def rows_of(plan: StepPlan) -> list[tuple[int, ...]]:
    """Inputs of each row: token, position, slot, blocks, its adapter and whether it is sampled."""
    found = []
    adapters = adapters_of(plan)
    for first, length, context, table_row in zip(
        plan.firsts, plan.lengths, plan.contexts, plan.table_rows, strict=True
    ):
        for row in range(int(first), int(first + length)):
            seen = int(context) - (int(first + length) - 1 - row)  # tokens that this row attends to
            blocks = plan.tables[table_row][: -(-seen // 4)].tolist()
            sampled = row in plan.sample_at.tolist()
            found.append(
                (
                    row,
                    int(plan.token_ids[row]),
                    int(plan.positions[row]),
                    int(plan.slots[row]),
                    seen,
                    *blocks,
                    adapters.get(row, NO_ADAPTER),
                    sampled,
                )
            )
    return sorted(found)


def adapters_of(plan: StepPlan) -> dict[int, int]:
    found = {int(row): at for at, rows in adapter_rows(plan) for row in rows}
    assert len(found) == len(plan.adapter_rows)
    assert len({at for at, _ in plan.adapter_runs.tolist()}) == len(plan.adapter_runs)
    return found


@given(plans(), st.integers(1, 4))
def test_micro_batches_compute_the_same_rows_in_order(plan: StepPlan, count: int) -> None:
    parts = plan_parts(plan, count)
    assert len(parts) == min(count, plan.num_tokens)
    shifted, start = [], 0
    for part in parts:
        shifted += [(row + start, *rest) for row, *rest in rows_of(part)]
        start += part.num_tokens
        assert len(part.token_ids) == len(part.slots) == padded_rows(part.num_tokens)
        assert set(part.slots[part.num_tokens :].tolist()) <= {NO_SLOT}
        assert part.longest == max(part.contexts.tolist())
        assert sorted(part.lengths.tolist()[: part.num_decodes]) == [1] * part.num_decodes
        assert 1 not in part.lengths.tolist()[part.num_decodes :]
    assert shifted == rows_of(plan)


@given(plans())
def test_a_plan_is_read_from_shared_memory_as_it_was_written(plan: StepPlan) -> None:
    descriptor = reserve_shared("plans", 2 * LIMITS.plan_bytes)
    memory = attach(descriptor)
    os.close(descriptor)
    slots = PlanSlots(memory, LIMITS)
    read = slots.read(slots.write(plan, 1))
    assert rows_of(read) == rows_of(plan)
    names = ("token_ids", "positions", "slots", "firsts", "lengths", "contexts", "sample_at")
    assert all(np.array_equal(getattr(read, name), getattr(plan, name)) for name in names)
    assert (read.num_tokens, read.num_decodes, read.longest) == (
        plan.num_tokens,
        plan.num_decodes,
        plan.longest,
    )
