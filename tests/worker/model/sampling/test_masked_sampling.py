"""A mask leaves its row the allowed tokens alone, by plain tensors and by the kernel, and changes
nothing else.
"""

import math

import numpy as np
import pytest
import torch

from pdcluster_worker.engine.ports import Sample, failed_row
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.requests import Constraint, SamplingParams
from pdcluster_worker.model.ops.kernel_arguments import kernel_operations
from pdcluster_worker.model.ops.kernel_object import Kernels, find_kernels
from pdcluster_worker.model.sampling.sampler import PLAIN_TENSORS, Sampler
from pdcluster_worker.structured_output.masks import Masks, bar

VOCAB = 300
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {
        "temperature": 1.2,
        "top_k": 5,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "logit_bias": {4: 2.0},
    },
]


def request_of(index, **options):
    sampling = SamplingParams(
        **{
            "max_tokens": 9,
            "seed": index,
            "logprobs": 2,
            "constraint": Constraint("regex", "a"),
            **options,
        }
    )
    return EngineRequest(f"r{index}", [1, 2, 3], 2, sampling)


def masks_of(rows, allowed, errors=None):
    mask = np.zeros((len(rows), VOCAB), dtype=np.bool_)
    for place, ids in enumerate(allowed):
        mask[place, ids] = True
    return Masks(np.array(rows, dtype=np.int64), mask, errors or {})


@pytest.fixture(params=["plain", "kernel"])
def row_ops(request):
    if request.param == "plain":
        return PLAIN_TENSORS
    found = find_kernels()
    if not isinstance(found, Kernels):
        pytest.skip(found.reason)
    return kernel_operations(found.library)


@pytest.mark.parametrize("options", SETTINGS)
def test_a_masked_row_chooses_as_if_it_had_no_other_tokens(row_ops, options):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    before = logits.clone()
    ids = [4, 17, 40, 41, 200, 299]
    requests = [request_of(index, **options) for index in range(3)]
    free = Sampler(VOCAB, row_ops).sample(logits, requests)
    alone = logits.clone()
    alone[1, [token for token in range(VOCAB) if token not in ids]] = -math.inf
    expected = Sampler(VOCAB, row_ops).sample(alone, requests)[1]

    masked = Sampler(VOCAB, row_ops).sample(logits, requests, masks_of([1], [ids]))

    assert masked[1].token_id == expected.token_id in ids
    assert [masked[0], masked[2]] == [free[0], free[2]]
    assert torch.equal(logits, before)
    assert masked[1].top_logprobs == free[1].top_logprobs  # those of the model, before any of this


def test_all_rows_may_be_masked(row_ops):
    sampler = Sampler(VOCAB, row_ops)
    outcomes = sampler.sample(
        torch.zeros(2, VOCAB), [request_of(0), request_of(1)], masks_of([0, 1], [[7], [9]])
    )

    assert [outcome.token_id for outcome in outcomes] == [7, 9]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_mask_does_not_hide_a_logit_that_is_not_finite(row_ops, bad):
    logits = torch.zeros(2, VOCAB)
    logits[0, 5] = bad
    error, other = Sampler(VOCAB, row_ops).sample(
        logits, [request_of(0), request_of(1)], masks_of([0, 1], [[7], [9]])
    )

    assert error.code == "not_finite"
    assert other.token_id == 9


def test_a_row_whose_allowed_tokens_the_model_excludes_fails_alone(row_ops):
    logits = torch.zeros(2, VOCAB)
    logits[0, 7] = -math.inf
    error, other = Sampler(VOCAB, row_ops).sample(
        logits, [request_of(0), request_of(1)], masks_of([0, 1], [[7], [9]])
    )

    assert error.code == "no_token_left"
    assert "its constraint allows none that its other settings do" in str(error)
    assert isinstance(other, Sample)


def test_a_row_that_does_not_fit_its_grammar_fails_alone(row_ops):
    error = failed_row("outside_grammar", "no")
    outcomes = Sampler(VOCAB, row_ops).sample(
        torch.zeros(2, VOCAB), [request_of(0), request_of(1)], masks_of([1], [[9]], {0: error})
    )

    assert outcomes[0] is error
    assert outcomes[1].token_id == 9


def test_tokens_that_are_barred_stay_where_nothing_else_is_left():
    mask = np.zeros(10, dtype=np.bool_)
    mask[[2, 5]] = True
    bar(mask, [5, 99])
    assert np.flatnonzero(mask).tolist() == [2]
    bar(mask, [2, 5])
    assert np.flatnonzero(mask).tolist() == [2]
