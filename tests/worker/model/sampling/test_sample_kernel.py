"""ops/kernels/sample.c against the plain tensor operations, bit for bit, for each level of
instructions that this CPU has.
"""

import ctypes
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_worker.model.ops.kernel_arguments import (
    RankArguments,
    SampleArguments,
    kernel_operations,
)
from pdcluster_worker.model.ops.kernel_object import LEVELS, Kernels, cpu_flags, load_kernels
from pdcluster_worker.model.sampling.picking import NOT_FINITE, NOTHING_LEFT, PICKED, pick_tokens
from pdcluster_worker.model.sampling.rows import Rows
from pdcluster_worker.model.sampling.sampler import Sampler, rank_tokens
from tests.worker.model.sampling.sampling_cases import make_request, random_logits, rows_for

ROWS = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)

KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "min_p": 0.03},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.4, "top_p": 0.999},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1.0, "top_k": 5000, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.0, "min_p": -0.0},
]


@pytest.fixture(scope="module", params=list(LEVELS))
def library(request):
    """The installed kernels of each level that this CPU has."""
    found = load_kernels(request.param, cpu_flags())
    if not isinstance(found, Kernels):
        pytest.skip(found.reason)
    return found.library


@pytest.fixture(scope="module")
def row_ops(library):
    return kernel_operations(library)


def same(row_ops, logits, rows):
    """Status and tokens, after a check that both ways give the same."""
    ours, plain = row_ops.pick(logits, rows), pick_tokens(logits, rows)
    assert ours.status.tolist() == plain.status.tolist()
    good = plain.status == PICKED
    assert ours.token_ids[good].tolist() == plain.token_ids[good].tolist()
    return ours


# The last group of 64 is whole, nearly whole, or one token alone.
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 1000, 49_152])
@pytest.mark.parametrize("scale", [0.01, 2.0, 12.0])
def test_kernel_picks_the_tokens_of_the_plain_operations(row_ops, vocab_size, scale):
    count = 2 if vocab_size > 10_000 else 20
    kinds = [{**kind, "seed": 31 * n} for n, kind in enumerate(KINDS * count)]
    logits = random_logits(vocab_size, len(kinds), vocab_size, scale)
    same(row_ops, logits, rows_for(vocab_size, *kinds))
    same(row_ops, logits.bfloat16().float(), rows_for(vocab_size, *kinds))


values = st.sampled_from(
    [-math.inf, -40.0, -2.0, -0.0, 0.0, 0.5, 3.0, 1e-40, 3e38, -3e38, math.nan, -math.nan, math.inf]
)
finite = st.floats(-30, 30, width=32)


@settings(max_examples=300)
@given(
    st.one_of(
        st.lists(values, min_size=1, max_size=70), st.lists(finite, min_size=1, max_size=200)
    ),
    st.floats(1e-5, 50.0),
    st.integers(0, 90),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)
def test_kernel_agrees_on_odd_logits_and_settings(
    row_ops, logits, temperature, top_k, top_p, min_p, u
):
    row = rows_for(
        len(logits), {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    )
    rows = Rows(row.inverse_temperature, row.top_k, row.top_p, row.min_p, np.array([u]))
    same(row_ops, torch.tensor([logits]), rows)


def test_kernel_fails_rows_alone(row_ops):
    logits = random_logits(1, 5, 1000)
    logits[1, 999], logits[2, 0], logits[3] = math.nan, math.inf, -math.inf
    for kind in KINDS:
        picks = same(row_ops, logits, rows_for(1000, *[kind] * 5))
        assert picks.status.tolist() == [PICKED, NOT_FINITE, NOT_FINITE, NOTHING_LEFT, PICKED]


@pytest.mark.parametrize("count", [0, 1, 5, 20, 1000])
def test_kernel_ranks_the_tokens_of_the_plain_operations(row_ops, count):
    logits = random_logits(3, 9, 1000, 5).bfloat16().float()
    logits[4, 7:] = -math.inf
    rows = np.array([8, 0, 4, 3])
    ours, plain = row_ops.rank(logits, rows, count), rank_tokens(logits, rows, count)
    for name in ("ids", "best", "total"):
        assert getattr(ours, name).tolist() == getattr(plain, name).tolist()


def shared_by(share, **functions):
    """Operations of functions over rows, run by `share(function, address, first, last)`."""

    def share_rows(pointer, address, first, last):
        share(ROWS(pointer.value), address, first, last)

    return kernel_operations(SimpleNamespace(share_rows=share_rows, **functions))


def test_rows_may_be_shared_between_threads_in_any_way(library, row_ops):
    def split(function, address, first, last):
        ends = [first, first + 1, (first + last) // 2, last]
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda pair: function(address, *pair), itertools.pairwise(ends)))

    shared = shared_by(split, sample_rows=library.sample_rows, rank_rows=library.rank_rows)
    kinds = [{**kind, "seed": n} for n, kind in enumerate(KINDS * 3)]
    logits = random_logits(5, len(kinds), 5000)
    rows = rows_for(5000, *kinds)
    assert (
        shared.pick(logits, rows).token_ids.tolist()
        == row_ops.pick(logits, rows).token_ids.tolist()
    )
    places = np.arange(len(kinds))
    assert (
        shared.rank(logits, places, 3).ids.tolist() == row_ops.rank(logits, places, 3).ids.tolist()
    )


def test_a_sampler_with_kernels_gives_the_same_samples(row_ops):
    options = [
        {"logprobs": 4},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 0},
        {"temperature": 1.0, "top_k": 30, "repetition_penalty": 1.3},
        {"logit_bias": {3: 4.0}, "temperature": 0.7},
    ]
    requests = [
        make_request([5, 6, 6], 1, name=str(n), **option) for n, option in enumerate(options)
    ]
    logits = random_logits(6, len(options), 3000)
    assert Sampler(3000, row_ops).sample(logits, requests) == Sampler(3000).sample(logits, requests)


def test_no_memory_is_an_error_of_the_step():
    def no_memory(name):
        def run(address, first, last):
            kind = SampleArguments if name == "status" else RankArguments
            array = getattr(kind.from_address(address), name)
            (ctypes.c_int64 * (last - first)).from_address(array)[:] = [
                3 if name == "status" else 0
            ] * (last - first)

        return ROWS(run)

    failing = shared_by(
        lambda function, *rows: function(*rows),
        sample_rows=no_memory("status"),
        rank_rows=no_memory("total"),
    )
    with pytest.raises(MemoryError, match="sampling"):
        failing.pick(torch.zeros(2, 9), rows_for(9, *[{"temperature": 1.0}] * 2))
    with pytest.raises(MemoryError, match="log probabilities"):
        failing.rank(torch.zeros(2, 9), np.array([0, 1]), 2)
