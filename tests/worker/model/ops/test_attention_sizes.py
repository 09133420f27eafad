import pytest
import torch

from pdcluster_worker.model.ops.operations import AttentionShape
from pdcluster_worker.model.ops.paged_attention import MAX_SPLITS, AttentionSizes, power_of_two

SMALL, LARGE = AttentionShape(9, 3, 64, 0.125), AttentionShape(64, 2, 256, 0.0625)


@pytest.mark.parametrize(("number", "needed"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_power_of_two(number: int, needed: int) -> None:
    assert power_of_two(number) == needed


def test_group_fills_a_product_of_tensor_cores() -> None:
    assert AttentionSizes.of(SMALL, torch.bfloat16, 2048).decode_rows == 16
    assert AttentionSizes.of(LARGE, torch.bfloat16, 2048).decode_rows == 32


def test_wide_heads_take_fewer_keys_at_a_time() -> None:
    assert AttentionSizes.of(SMALL, torch.bfloat16, 2048).key_block == 64
    assert AttentionSizes.of(LARGE, torch.bfloat16, 2048).key_block == 32
    assert AttentionSizes.of(LARGE, torch.float32, 2048).key_block == 16


@pytest.mark.parametrize(
    ("longest", "doublings", "max_splits"),
    [(8, 0, 1), (2048, 0, 8), (8193, 1, 32), (131072, 4, 32)],
)
def test_a_longer_limit_adds_sizes_and_changes_none(
    longest: int, doublings: int, max_splits: int
) -> None:
    sizes = AttentionSizes.of(SMALL, torch.bfloat16, longest)

    assert (sizes.split_keys, sizes.doublings, sizes.max_splits) == (256, doublings, max_splits)
    assert max_splits <= MAX_SPLITS
    assert (sizes.split_keys << sizes.doublings) * sizes.max_splits >= longest
