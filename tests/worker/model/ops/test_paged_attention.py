"""Tile sizes, and the prompts that torch attends to.

What both compute is compared in test_cuda_operations.
"""

import pytest
import torch

from pdcluster_worker.model.decoder_loader import make_operations
from pdcluster_worker.model.ops import paged_attention
from pdcluster_worker.model.ops.operations import AttentionShape
from pdcluster_worker.model.ops.paged_attention import (
    MAX_SPLITS,
    AttentionSizes,
    TorchAttention,
    make_attention,
)
from pdcluster_worker.model.step_plan import StepLimits, StepPlan
from tests.worker.model.ops import paged_steps as cases

MIXED = cases.Case("mixed", ((12, 1), (3, 1), (40, 25), (2, 2), (9, 9)), padding=4)
LIMITS = StepLimits(max_tokens=64, max_sequences=20, longest=100, block_size=16)


SMALL, LARGE = AttentionShape(9, 3, 64, 0.125), AttentionShape(64, 2, 256, 0.0625)


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


def test_long_prompts_are_noted_and_no_chunk_after_a_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_attention, "MIN_ROWS", 9)
    cache = torch.zeros(20, 2, 1, 2, 4, 16)
    sizes = AttentionSizes.of(MIXED.shape, cache.dtype, 100)
    attention = TorchAttention(cache, MIXED.shape, sizes)

    attention.begin(cases.make_step(MIXED).plan)

    assert attention._prompts == [slice(29, 38)]
    assert attention._other_lengths is not None
    assert attention._other_lengths.tolist() == [1, 1, 25, 2, 0]


def test_cache_of_a_cpu_is_tritons() -> None:
    shape = cases.Case("", ((1, 1),), head_dim=64).shape
    cache = torch.zeros(2, 1, 1, 2, 16, 64, dtype=torch.bfloat16)
    assert make_attention(cache, shape, LIMITS).name == "triton"


@pytest.mark.parametrize("kernels", ["", "off"])
def test_step_of_a_cpu_is_the_decoders_own(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCLUSTER_KERNELS", kernels)

    def forward(plan: StepPlan) -> torch.Tensor:
        return plan.token_ids

    assert (
        make_operations(
            torch.zeros(2, 1, 1, 2, 16, 64), MIXED.shape, LIMITS, invariant=False
        ).prepare(forward)
        is forward
    )


def test_limits_count_padding_and_whole_blocks() -> None:
    assert (LIMITS.rows, LIMITS.sequences, LIMITS.blocks) == (64, 32, 7)
