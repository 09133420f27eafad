"""The kernels of rotation, store and attention against plain torch, over ragged steps whose
strangers' slots are NaN.
"""

import copy
import itertools
import math

import pytest
import torch

from pdcluster_worker.model.ops.reference import Reference
from tests.worker.model.ops.paged_steps import LAYER, Case, part_of, stored_step

DECODES = ((1, 1), (16, 1), (255, 1), (256, 1), (257, 1), (700, 1))
MIXED = ((20, 1), (300, 1), (40, 40), (600, 90), (259, 2))


def heads_of(query, kv, dim, block_size, half=None):
    return Case("", (), query, kv, dim, block_size, half=half)


HEADS = {
    "smollm": heads_of(9, 3, 64, 16),
    "one head each, small blocks": heads_of(4, 4, 16, 8),
    "group of 8, dim 80, part rotated": heads_of(8, 1, 80, 32, half=10),
    "group of 9, dim 128": heads_of(9, 1, 128, 16),
    "group of 7, dim 256": heads_of(14, 2, 256, 16),
    "group of 40": heads_of(40, 1, 32, 16, half=12),
    "dim 8, blocks of 3": heads_of(2, 1, 8, 3),
}
CLOSE = {torch.bfloat16: 3e-2, torch.float32: 2e-5}


@pytest.fixture(params=list(HEADS))
def heads(request):
    return HEADS[request.param]


@pytest.mark.parametrize("sequences", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_attention_equals_plain_torch(heads, sequences, dtype, make_cpu):
    step = stored_step(heads, sequences, dtype)
    expected = Reference(step.cache, heads.shape).attend(step.qkv, step.plan, LAYER)
    found = make_cpu(step).attend(step.qkv, step.plan, LAYER)
    torch.testing.assert_close(found, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])
    assert not found[step.plan.num_tokens :].any()


@pytest.mark.parametrize("window", [20, 300])
@pytest.mark.parametrize("sequences", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_attention_within_a_window_equals_plain_torch(heads, sequences, window, dtype, make_cpu):
    step = stored_step(heads, sequences, dtype, window)
    expected = Reference(step.cache, heads.shape).attend(step.qkv, step.plan, LAYER, window)
    found = make_cpu(step).attend(step.qkv, step.plan, LAYER, window)
    torch.testing.assert_close(found, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


def test_a_window_as_long_as_the_context_changes_no_bit(dtype, make_cpu):
    step = stored_step(HEADS["smollm"], MIXED, dtype)
    cpu = make_cpu(step)
    assert torch.equal(
        cpu.attend(step.qkv, step.plan, LAYER, 600), cpu.attend(step.qkv, step.plan, LAYER)
    )


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("with_rotation", [False, True])
def test_rotated_and_stored_rows_equal_plain_torch(
    heads, with_rotation, with_norms, dtype, make_cpu
):
    step = stored_step(heads, MIXED, dtype)
    theirs = copy.deepcopy(step)
    chosen = (LAYER, step.rotation if with_rotation else None, step.norms if with_norms else None)
    Reference(theirs.cache, heads.shape).rope_store(theirs.qkv, theirs.plan, *chosen)
    make_cpu(step).rope_store(step.qkv, step.plan, *chosen)
    rows = step.plan.num_tokens
    # Norms sum in another order, so the last bit may differ.
    close = {} if with_norms else {"atol": 0, "rtol": 0}
    torch.testing.assert_close(step.qkv[:rows], theirs.qkv[:rows], **close)
    torch.testing.assert_close(step.cache, theirs.cache, equal_nan=True, **close)


def test_attention_has_the_same_bits_on_any_number_of_threads(dtype, make_cpu, each_thread_count):
    step = stored_step(HEADS["smollm"], MIXED, dtype)
    results = [make_cpu(step).attend(step.qkv, step.plan, LAYER) for _ in each_thread_count()]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("window", [None, 40, 290])
def test_rows_have_the_same_bits_however_a_prompt_is_cut(heads, window, dtype, make_cpu):
    """As one chunk, in chunks, as decodes, and beside other sequences."""
    step = stored_step(heads, MIXED, dtype)
    index, first, num_rows = 3, int(step.plan.firsts[3]), 90
    whole = make_cpu(step).attend(step.qkv, step.plan, LAYER, window)[first : first + num_rows]
    for cuts in ([0, 90], [0, 1, 33, 34, 90], [0, 64, 89, 90], [0, *range(70, 91)]):
        pieces = [part_of(step, index, *cut) for cut in itertools.pairwise(cuts)]
        cut = torch.cat(
            [make_cpu(piece).attend(piece.qkv, piece.plan, LAYER, window) for piece in pieces]
        )
        assert torch.equal(cut, whole), cuts


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_no_row_before_it(bad, dtype, make_cpu):
    """A row of a chunk has a bad key and value, another sequence none."""
    step = stored_step(HEADS["smollm"], ((30, 1), (300, 80)), dtype)
    clean = make_cpu(step).attend(step.qkv, step.plan, LAYER)
    table_row, place = int(step.plan.table_rows[1]), 260
    block, offset = divmod(place, 16)
    step.cache[int(step.plan.tables[table_row, block]), :, LAYER, :, offset] = bad
    found = make_cpu(step).attend(step.qkv, step.plan, LAYER)
    row = 1 + place - 220
    assert torch.equal(found[:row], clean[:row])
    assert not found[row : step.plan.num_tokens].isfinite().any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_no_row_whose_window_has_left_it(bad, dtype, make_cpu):
    step = stored_step(HEADS["smollm"], ((300, 1), (300, 80)), dtype)
    clean = make_cpu(step).attend(step.qkv, step.plan, LAYER, 30)
    place = 240
    for table_row in step.plan.table_rows.tolist():
        step.cache[int(step.plan.tables[table_row, place // 16]), :, LAYER, :, place % 16] = bad
    found = make_cpu(step).attend(step.qkv, step.plan, LAYER, 30)
    seen = range(1 + place - 220, 1 + place - 220 + 30)
    unseen = [row for row in range(81) if row not in seen]
    assert torch.equal(found[unseen], clean[unseen])
    assert not found[list(seen)].isfinite().any()


def test_a_bad_value_reaches_every_row_that_sees_it(dtype, make_cpu):
    step = stored_step(HEADS["smollm"], ((300, 80),), dtype)
    clean = make_cpu(step).attend(step.qkv, step.plan, LAYER)
    step.cache[
        int(step.plan.tables[step.plan.table_rows[0], 260 // 16]), 1, LAYER, 1, 260 % 16, 5
    ] = math.nan
    found = make_cpu(step).attend(step.qkv, step.plan, LAYER).view(-1, 9, 64)
    assert found[40:80, 3:6, 5].isnan().all()
    found[40:80, 3:6, 5] = clean.view(-1, 9, 64)[40:80, 3:6, 5]
    assert torch.equal(found, clean.view(-1, 9, 64))


def test_a_bad_query_spoils_its_own_heads_alone(dtype, make_cpu):
    step = stored_step(HEADS["smollm"], MIXED, dtype)
    clean = make_cpu(step).attend(step.qkv, step.plan, LAYER)
    step.qkv[50, 64:128] = math.nan
    found = make_cpu(step).attend(step.qkv, step.plan, LAYER)
    assert found[50, 64:128].isnan().all()
    found[50, 64:128] = clean[50, 64:128]
    assert torch.equal(found, clean)
