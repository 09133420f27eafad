"""How a batch becomes tensors: flat order, slots, groups of decodes, blocks that are opened."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.engine.batch import Batch, Scheduled
from pdcluster_worker.engine.messages import KVGeometry, Sampling
from pdcluster_worker.engine.request import Request
from pdcluster_worker.model.inputs import MIN_PADDING_BLOCKS, build_inputs, length_groups, opened_blocks
from pdcluster_worker.model.kv_cache import KVCache

GEOMETRY = KVGeometry(num_kv_heads=1, head_dim=4, num_layers=1, block_size=4, dtype="float32")


def scheduled(num_tokens, computed, count, table=(7, 3, 5, 1)):
    request = Request("r", list(range(100, 100 + num_tokens)), num_tokens, Sampling(max_tokens=9, seed=0))
    request.num_computed_tokens = computed
    request.block_table = list(table)
    return Scheduled(request, count)


def test_items_are_laid_out_flat_in_batch_order():
    cache = KVCache(GEOMETRY, 8)
    inputs = build_inputs(Batch((scheduled(6, 5, 1), scheduled(9, 2, 3), scheduled(3, 0, 3))), cache)
    assert inputs.token_ids.tolist() == [[105, 102, 103, 104, 100, 101, 102]]
    assert inputs.positions.tolist() == [[5, 2, 3, 4, 0, 1, 2]]
    slots = [3 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 3 * 4, 7 * 4, 7 * 4 + 1, 7 * 4 + 2]
    assert torch.equal(inputs.write_rows, cache.write_rows(torch.tensor(slots)))
    assert inputs.sample_at.tolist() == [0, 6]  # the middle one is not at its end
    assert [(chunk.first, chunk.last, chunk.context) for chunk in inputs.chunks] == [(1, 4, 5), (4, 7, 3)]
    assert inputs.chunks[0].mask.tolist() == [
        [0, 0, 0, float("-inf"), float("-inf")],
        [0, 0, 0, 0, float("-inf")],
        [0, 0, 0, 0, 0],
    ]
    assert inputs.chunks[1].mask is None
    assert inputs.only_group is None


def test_decodes_alone_are_one_group_without_scattering():
    inputs = build_inputs(Batch((scheduled(8, 7, 1), scheduled(3, 2, 1))), KVCache(GEOMETRY, 8))
    group = inputs.only_group
    assert group is not None
    assert group.tokens.tolist() == [0, 1]
    assert (group.mask[:, 0, 0] == 0).sum(1).tolist() == [8, 3]


def test_a_group_that_fills_its_blocks_needs_no_mask():
    inputs = build_inputs(Batch((scheduled(8, 7, 1), scheduled(8, 7, 1))), KVCache(GEOMETRY, 8))
    assert inputs.groups[0].mask is None


@pytest.mark.parametrize(
    ("num_tokens", "computed", "count", "opened"),
    [
        (5, 4, 1, (3,)),  # first slot of a block
        (6, 5, 1, ()),  # already open
        (4, 3, 1, ()),  # fills its block
        (8, 0, 8, ()),  # fills all
        (9, 0, 9, (5,)),
        (9, 4, 3, (3,)),
        (7, 6, 1, ()),
        (3, 0, 3, (7,)),
    ],
)
def test_a_block_that_is_started_and_not_filled_is_opened(num_tokens, computed, count, opened):
    assert opened_blocks(scheduled(num_tokens, computed, count), 4) == opened


def test_like_lengths_are_one_group_and_one_long_context_stands_alone():
    assert length_groups([10, 9, 12, 7]) == [[0, 1, 2, 3]]
    assert length_groups([1, 2, 1]) == [[0, 1, 2]]  # little to save
    assert length_groups([5, 500, 6]) == [[1], [0, 2]]
    assert length_groups([]) == []


@given(st.lists(st.integers(1, 600), max_size=40))
def test_groups_hold_every_context_once_and_bound_the_padding(counts):
    groups = length_groups(counts)
    assert sorted(index for group in groups for index in group) == list(range(len(counts)))
    for group in groups:
        longest = max(counts[index] for index in group)
        padding = sum(longest - counts[index] for index in group)
        assert padding <= sum(counts[index] for index in group) + MIN_PADDING_BLOCKS
