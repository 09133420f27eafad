"""Quantized keys and values: the bounds of their rounding, and kernels that read and write them
against plain torch.
"""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.kv_size import block_num_bytes, cache_tensor, stored_kv
from pdcluster_worker.model.loading.loader import stored_in
from pdcluster_worker.model.ops.reference import Reference
from pdcluster_worker.model.ops.stored_kv import LEAST, TOPS, quantize
from tests.worker.model.ops.paged_steps import LAYER, STORED, Case, part_of, stored_as, stored_step

DTYPES = pytest.mark.parametrize("dtype", list(TOPS), ids=str)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
BF16 = KVGeometry(3, 64, 30, 16, "bfloat16")


def back(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows, scales = quantize(x, dtype)
    return rows.float() * scales.unsqueeze(-1)


@DTYPES
@given(row=st.lists(FINITE, min_size=1, max_size=9).map(torch.tensor))
@example(row=torch.tensor([LEAST, 0.0, -LEAST / 3]))
@example(row=torch.tensor([LEAST / 2, 0.0]))
def test_rows_come_back_within_the_bound_of_their_dtype(row: torch.Tensor, dtype: torch.dtype):
    found = back(row, dtype)
    assert found.isfinite().all()
    row = row.clamp(-3e38, 3e38)
    greatest = row.abs().max().item()
    step = greatest / 254 if dtype == torch.int8 else greatest / 448 / 1024
    relative = 0.0 if dtype == torch.int8 else 1 / 16
    bound = (step + relative * row.abs()) * (1 + 1e-5) + LEAST
    assert ((found - row).abs() <= bound).all()


@DTYPES
def test_a_row_of_zeros_is_exact_and_has_no_scale(dtype):
    rows, scales = quantize(torch.zeros(2, 5), dtype)
    assert not rows.view(torch.int8).any()
    assert not scales.any()


@DTYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_nan_as_a_whole(dtype, bad):
    found = back(torch.tensor([[1.0, bad], [1.0, 2.0]]), dtype)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


@DTYPES
def test_a_row_is_quantized_without_the_others(dtype):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)) * 10
    whole, alone = quantize(x, dtype), [quantize(row, dtype) for row in x]
    assert torch.equal(
        whole[0].view(torch.int8), torch.stack([r for r, _ in alone]).view(torch.int8)
    )
    assert torch.equal(whole[1], torch.stack([s for _, s in alone]))


def test_a_block_has_about_half_the_bytes():
    halves = {kind: stored_in(BF16, kind) for kind in ("auto", "bf16", "int8", "fp8_e4m3")}
    num_bytes = {kind: block_num_bytes(each) for kind, each in halves.items()}
    assert num_bytes["auto"] == num_bytes["bf16"] == 3 * 30 * 2 * 16 * 64 * 2
    assert num_bytes["int8"] == num_bytes["fp8_e4m3"] == 3 * 30 * 2 * 16 * (64 + 4)


def test_views_of_a_part_are_those_of_the_whole():
    """As ranks have them: some heads and layers, odd sizes."""
    geometry = KVGeometry(4, 5, 3, 3, "int8", computed_dtype="float32")
    dtype, shape = cache_tensor(geometry, 2)
    whole = torch.randint(0, 255, shape, dtype=dtype)
    stored, part = (stored_kv(each, geometry) for each in (whole, whole[:, 2:4, 1:]))
    assert part.is_whole
    assert torch.equal(part.rows, stored.rows[:, 2:4, 1:])
    assert torch.equal(part.scales.view(torch.int32), stored.scales[:, 2:4, 1:].view(torch.int32))
    assert part.rows.data_ptr() == stored.rows[:, 2:4, 1:].data_ptr()


MIXED = ((1, 1), (20, 1), (300, 1), (40, 40), (600, 90), (259, 2))
HEADS = {
    "smollm": Case("", (), 9, 3, 64, 16),
    "small blocks": Case("", (), 4, 4, 16, 8),
    "group of 8, dim 80": Case("", (), 8, 1, 80, 32, half=10),
    "group of 9, dim 128": Case("", (), 9, 1, 128, 16),
    "dim 8, blocks of 3": Case("", (), 2, 1, 8, 3),
}
CLOSE = {torch.bfloat16: 3e-2, torch.float32: 2e-5}


@pytest.fixture(params=list(HEADS))
def heads(request):
    return HEADS[request.param]


@pytest.fixture(params=STORED)
def kind(request):
    return request.param


@pytest.mark.parametrize("window", [None, 20, 300])
def test_attention_equals_plain_torch(heads, kind, window, dtype, make_cpu):
    step = stored_as(stored_step(heads, MIXED, dtype, window), kind)
    expected = Reference(step.cache, heads.shape).attend(step.qkv, step.plan, LAYER, window)
    found = make_cpu(step).attend(step.qkv, step.plan, LAYER, window)
    torch.testing.assert_close(found, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


def test_attention_is_near_that_of_keys_that_are_not_quantized(heads, kind, dtype, make_cpu):
    step = stored_step(heads, MIXED, dtype)
    expected = make_cpu(step).attend(step.qkv, step.plan, LAYER)
    stored = stored_as(step, kind)
    found = make_cpu(stored).attend(step.qkv, step.plan, LAYER)
    error = (found - expected).float().norm() / expected.float().norm()
    assert error < (6e-2 if kind == "fp8_e4m3" else 2e-2)


def test_stored_rows_have_the_bytes_of_plain_torch(heads, kind, dtype, make_cpu):
    step = stored_as(stored_step(heads, MIXED, dtype), kind)
    for row, value in enumerate((0.0, 1e-37, math.nan, math.inf, 3.3e38)):
        step.qkv[row, heads.num_heads * heads.head_dim :] = value
    theirs = copy.deepcopy(step)
    Reference(theirs.cache, heads.shape).rope_store(theirs.qkv, theirs.plan, LAYER, None, None)
    make_cpu(step).rope_store(step.qkv, step.plan, LAYER, None, None)
    mine, other = step.cache, theirs.cache
    if mine.scales is None:
        torch.testing.assert_close(mine.rows, other.rows, rtol=0, atol=0, equal_nan=True)
    else:
        assert torch.equal(mine.rows.view(torch.int8), other.rows.view(torch.int8))
        torch.testing.assert_close(mine.scales, other.scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("window", [None, 40, 290])
def test_rows_have_the_same_bits_however_a_prompt_is_cut(heads, kind, window, dtype, make_cpu):
    """As one chunk, in chunks, as decodes, and beside other sequences."""
    step = stored_as(stored_step(heads, MIXED, dtype), kind)
    index, first, num_rows = 4, int(step.plan.firsts[4]), 90
    whole = make_cpu(step).attend(step.qkv, step.plan, LAYER, window)[first : first + num_rows]
    for cuts in ([0, 90], [0, 1, 33, 34, 90], [0, *range(70, 91)]):
        pieces = [part_of(step, index, *cut) for cut in itertools.pairwise(cuts)]
        cut = torch.cat(
            [make_cpu(piece).attend(piece.qkv, piece.plan, LAYER, window) for piece in pieces]
        )
        assert torch.equal(cut, whole), cuts


@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
def test_what_is_not_finite_reaches_the_rows_that_see_it_alone(half, kind, dtype, make_cpu):
    step = stored_as(stored_step(HEADS["smollm"], ((30, 1), (300, 80)), dtype), kind)
    clean = make_cpu(step).attend(step.qkv, step.plan, LAYER)
    block, offset = divmod(260, 16)
    place = int(step.plan.tables[int(step.plan.table_rows[1]), block]), slice(None), LAYER, half
    bad = step.cache.rows if step.cache.scales is None else step.cache.scales
    bad[*place, offset] = math.nan
    found = make_cpu(step).attend(step.qkv, step.plan, LAYER)
    row = 1 + 260 - 220
    assert torch.equal(found[:row], clean[:row])
    assert not found[row : step.plan.num_tokens].isfinite().any()
