"""The kernels of products, norms and gates against plain torch; their bits depend on nothing but
the row.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_worker.model.ops.cpu import CpuOperations
from pdcluster_worker.model.ops.operations import AttentionShape, Norm
from pdcluster_worker.model.ops.reference import Reference

SHAPE = AttentionShape(1, 1, 16, 1.0)
CLOSE = {torch.bfloat16: 1e-2, torch.float32: 2e-5}
DEEP = 2432
"""More than STEPS_AT_ONCE in every dtype, so that sums wait for the next steps; 300 rows are more
than MOST_ROW_BYTES (`pairs.h`).
"""
BAD = [math.nan, math.inf, -math.inf]


@pytest.fixture
def cpu(kernels, dtype):
    return CpuOperations(torch.zeros(1, 1, 1, 2, 16, 16, dtype=dtype), SHAPE, kernels)


@pytest.fixture
def reference(dtype):
    return Reference(torch.zeros(1, 1, 1, 2, 16, 16, dtype=dtype), SHAPE)


@pytest.mark.parametrize("wide", [False, True], ids=["", "wide"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [
        (1, 960, 576),
        (16, 40, 64),
        (33, 70, 40),
        (47, 64, 96),
        (300, 1000, 100),
        (5, 3, 7),
        (33, 70, DEEP),
    ],
)
def test_product_equals_plain_torch(rows, columns, depth, biased, wide, dtype, cpu, reference):
    x, weight = (
        torch.randn(rows, depth).to(dtype),
        (torch.randn(columns, depth) / math.sqrt(depth)).to(dtype),
    )
    bias = torch.randn(columns).to(dtype) if biased else None
    expected = reference.linear(x, reference.pack(weight, bias, wide=wide))
    found = cpu.linear(x, cpu.pack(weight, bias, wide=wide))
    close = CLOSE[torch.float32 if wide else dtype]
    torch.testing.assert_close(found, expected, atol=close, rtol=close)


@pytest.mark.parametrize("depth", [192, DEEP])
@pytest.mark.parametrize("wide", [False, True], ids=["", "wide"])
def test_a_rows_product_has_the_same_bits_alone_and_among_others(
    depth, wide, dtype, cpu, each_thread_count
):
    x, weight = torch.randn(300, depth).to(dtype), torch.randn(500, depth).to(dtype)
    packed = cpu.pack(weight, wide=wide)
    expected = cpu.linear(x, packed)
    for _ in each_thread_count():
        for rows in (1, 2, 7, 16, 31, 32, 33, 150, 299):
            assert torch.equal(cpu.linear(x[-rows:].contiguous(), packed), expected[-rows:]), rows


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite_stays_in_its_row_of_a_product(bad, dtype, cpu):
    x, weight = torch.randn(40, 40).to(dtype), torch.randn(33, 40).to(dtype)
    packed = cpu.pack(weight)
    clean = cpu.linear(x, packed)
    x[17, 39] = bad
    found = cpu.linear(x, packed)
    assert not found[17].isfinite().any()
    found[17] = clean[17]
    assert torch.equal(found, clean)


@pytest.mark.parametrize("rounds_first", [False, True])
@pytest.mark.parametrize("width", [576, 40, 7])
def test_norm_equals_plain_torch(width, rounds_first, dtype, cpu, reference):
    norm = Norm(torch.rand(width) + 0.5, 1e-5, rounds_first)
    hidden, x = torch.randn(2, 90, width).to(dtype).unbind()
    ours, theirs = hidden.clone(), hidden.clone()
    for added in (None, x):
        found, expected = (
            cpu.add_rms_norm(added, ours, norm),
            reference.add_rms_norm(added, theirs, norm),
        )
        torch.testing.assert_close(found, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_silu"])
@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(
        st.floats(-1e4, 1e4, width=32) | st.sampled_from([*BAD, 88.5, -88.5, -103.9, 0.0]),
        min_size=1,
        max_size=70,
    )
)
def test_gate_equals_plain_torch(values, activation, kernels):
    """Also where exp overflows, and for what is not finite."""
    for dtype in (torch.float32, torch.bfloat16):
        cache = torch.zeros(1, 1, 1, 2, 16, 16, dtype=dtype)
        gate = torch.tensor([values]).to(dtype)
        gate_up = torch.cat((gate, torch.full_like(gate, 0.75)), 1)
        expected = Reference(cache, SHAPE).gate_mul(gate_up, activation)
        found = CpuOperations(cache, SHAPE, kernels).gate_mul(gate_up, activation)
        torch.testing.assert_close(
            found, expected, atol=CLOSE[dtype] / 10, rtol=CLOSE[dtype], equal_nan=True
        )


def test_rows_have_the_same_bits_on_any_number_of_threads(dtype, cpu, each_thread_count):
    norm, hidden = Norm(torch.rand(576), 1e-5), torch.randn(100, 576).to(dtype)
    gate_up = torch.randn(100, 1152).to(dtype)
    results = [
        (cpu.add_rms_norm(None, hidden, norm), cpu.gate_mul(gate_up, "silu"))
        for _ in each_thread_count()
    ]
    for normed, gated in results:
        assert torch.equal(normed, results[0][0])
        assert torch.equal(gated, results[0][1])


def test_packed_weights_do_not_need_the_original(dtype, cpu):
    weight, x = torch.randn(40, 64).to(dtype), torch.randn(3, 64).to(dtype)
    packed = cpu.pack(weight)
    expected = cpu.linear(x, packed)
    weight.zero_()
    assert torch.equal(cpu.linear(x, packed), expected)


def test_a_cache_with_gaps_is_refused(kernels):
    with pytest.raises(ValueError, match="not contiguous within a head"):
        CpuOperations(torch.zeros(4, 1, 1, 2, 16, 32)[..., ::2], SHAPE, kernels)


@pytest.mark.parametrize("wide", [False, True], ids=["", "wide"])
@pytest.mark.parametrize(("columns", "depth"), [(70, 64), (33, 40), (3, 7)])
def test_rows_of_packed_weights_are_what_was_packed(columns, depth, wide, dtype, cpu, reference):
    weight = torch.randn(columns, depth).to(dtype)
    rows = torch.tensor([0, columns - 1, columns // 2, 0])
    for ops in (cpu, reference):
        found = ops.rows_of(ops.pack(weight, wide=wide), rows)
        assert torch.equal(found, weight[rows])


@pytest.mark.parametrize("row", [-1, 40])
def test_a_row_that_weights_do_not_have_is_refused(row, dtype, cpu):
    packed = cpu.pack(torch.randn(40, 64).to(dtype))
    with pytest.raises(IndexError, match="that have 40"):
        cpu.rows_of(packed, torch.tensor([1, row]))
