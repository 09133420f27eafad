"""Experts by the kernels beside the reference: whatever is chosen, of a rank's part too."""

import math
from dataclasses import replace

import pytest
import torch

from pdcluster_worker.model.ops.cpu import CpuOperations
from pdcluster_worker.model.ops.experts import Experts, choose
from pdcluster_worker.model.ops.operations import AttentionShape, Operations
from pdcluster_worker.model.ops.reference import Reference

SHAPE = AttentionShape(2, 1, 16, 0.25)
WIDTH, INNER, COUNT = 96, 64, 20
CLOSE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}


def cache_of(dtype):
    return torch.zeros(1, 1, 1, 2, 16, 16, dtype=dtype)


@pytest.fixture
def cpu(kernels, dtype):
    return CpuOperations(cache_of(dtype), SHAPE, kernels)


def make_experts(
    ops: Operations, dtype, *, own=range(COUNT), chosen=3, width=WIDTH, inner=INNER, **settings
) -> Experts:
    """The weights are the same whichever are a rank's own."""
    random = torch.Generator().manual_seed(3)

    def packed(columns, depth, *, wide=False):
        weight = torch.randn(columns, depth, generator=random) / math.sqrt(depth)
        bias = torch.randn(columns, generator=random)
        return ops.pack(weight.to(dtype), bias.to(dtype), wide=wide)

    router = packed(COUNT, width, wide=True)
    each = [(packed(2 * inner, width), packed(width, inner)) for _ in range(COUNT)]
    gate_up, down = zip(*[each[at] for at in own], strict=True)
    return Experts(router, gate_up, down, chosen, settings.get("normalizes", True), own.start)


def rows(count, dtype, width=WIDTH):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(4)).to(dtype)


def same_choice(x, experts, ops):
    """Rows in which the greatest logits differ by more than rounding."""
    logits = ops.linear(x, experts.router).sort(dim=1, descending=True).values
    return logits[:, experts.chosen - 1] - logits[:, experts.chosen] > 0.05


@pytest.mark.parametrize("count", [1, 7, 300])
@pytest.mark.parametrize("chosen", [1, 3, COUNT - 1])
@pytest.mark.parametrize("normalizes", [True, False])
def test_experts_equal_plain_torch(count, chosen, normalizes, dtype, cpu):
    reference = Reference(cache_of(dtype), SHAPE)
    x = rows(count, dtype)
    settings = {"chosen": chosen, "normalizes": normalizes}
    ours, theirs = (make_experts(ops, dtype, **settings) for ops in (cpu, reference))
    found = cpu.mix_experts(x, ours, "silu")
    expected = reference.mix_experts(x, theirs, "silu")
    alike = same_choice(x, theirs, reference)
    assert alike.sum() > 0.6 * count
    torch.testing.assert_close(found[alike], expected[alike], atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("count", [1, 40])
def test_ranks_parts_add_up(count, dtype, cpu):
    x = rows(count, dtype)
    whole = cpu.mix_experts(x, make_experts(cpu, dtype), "clamped_silu")
    parts = [
        cpu.mix_experts(x, make_experts(cpu, dtype, own=own), "clamped_silu").float()
        for own in (range(8), range(8, COUNT))
    ]
    torch.testing.assert_close(sum(parts), whole.float(), atol=CLOSE[dtype], rtol=CLOSE[dtype])


def test_a_rank_without_chosen_experts_adds_nothing(dtype, cpu):
    x = rows(1, dtype)
    experts = make_experts(cpu, dtype, chosen=1)
    logits = cpu.linear(x, experts.router).to(dtype)
    other = (int(choose(logits, experts)[0]) + 1) % COUNT
    own = make_experts(cpu, dtype, chosen=1, own=range(other, other + 1))
    assert not cpu.mix_experts(x, own, "silu").any()


def test_a_rows_bits_do_not_depend_on_others_nor_on_threads(dtype, cpu, each_thread_count):
    x, experts = rows(90, dtype), make_experts(cpu, dtype)
    alone = torch.cat([cpu.mix_experts(row, experts, "silu") for row in x.split(1)])
    for _ in each_thread_count():
        assert torch.equal(cpu.mix_experts(x, experts, "silu"), alone)


def test_a_row_that_is_not_finite_leaves_others_as_they_are(dtype, cpu):
    x, experts = rows(9, dtype), make_experts(cpu, dtype)
    expected = cpu.mix_experts(x, experts, "silu")
    x[4, 3] = float("nan")
    found = cpu.mix_experts(x, experts, "silu")
    assert found[4].isnan().all()
    others = torch.arange(9) != 4
    assert torch.equal(found[others], expected[others])


def test_of_equal_logits_the_first_experts_are_chosen(dtype, cpu):
    x = rows(3, dtype)
    experts = make_experts(cpu, dtype, chosen=2)
    same = cpu.pack(torch.zeros(COUNT, WIDTH, dtype=dtype), wide=True)
    found = cpu.mix_experts(x, replace(experts, router=same), "silu")
    first = make_experts(cpu, dtype, own=range(2), chosen=2)
    assert torch.equal(found, cpu.mix_experts(x, replace(first, router=same), "silu"))


def test_rows_that_need_padding_run_expert_by_expert(dtype, cpu):
    x = rows(30, dtype, 40)
    experts = make_experts(cpu, dtype, width=40, inner=24)
    found = cpu.mix_experts(x, experts, "silu")
    assert torch.equal(found, Operations.mix_experts(cpu, x, experts, "silu"))
    assert found.isfinite().all()
