"""Arguments that FlashInfer gets, and batches without it.  FlashInfer itself needs a GPU."""

import pytest
import torch

from pdcluster_worker.model.ops.choose import make_operations
from pdcluster_worker.model.ops.flashinfer_attention import chunk_pages, make_attention
from pdcluster_worker.model.ops.step_limits import StepLimits
from pdcluster_worker.model.step_plan import StepPlan
from tests.worker.model.ops import device_cases as cases

MIXED = cases.Case("mixed", ((12, 1), (3, 1), (40, 25), (2, 2), (9, 3)), padding=4)
LIMITS = StepLimits(max_tokens=64, max_sequences=20, longest=100, block_size=16)


def test_pages_are_those_of_the_chunks() -> None:
    plan = cases.make_step(MIXED).plan
    tables = [plan.tables[seat].tolist() for seat in plan.seats.tolist()]

    pages = chunk_pages(plan, 4)

    assert pages.row_starts.tolist() == [0, 25, 27, 30]
    assert pages.page_starts.tolist() == [0, 10, 11, 14]
    assert pages.pages.tolist() == [*tables[2][:10], *tables[3][:1], *tables[4][:3]]
    assert pages.last_lengths.tolist() == [4, 2, 1]
    assert pages.rows.tolist() == list(range(2, 32))
    assert {
        each.dtype
        for each in (pages.row_starts, pages.page_starts, pages.pages, pages.last_lengths)
    } == {torch.int32}


def test_cache_of_a_cpu_is_no_business_of_flashinfer() -> None:
    assert (
        make_attention(
            torch.zeros(2, 1, 1, 2, 16, 64), cases.Case("", ((1, 1),), head_dim=64).shape, LIMITS
        ).name
        == "triton"
    )


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
