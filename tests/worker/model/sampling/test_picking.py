"""Choosing tokens: the cuts by hand, the order of equals, and results that company and threads do
not touch.
"""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_worker.model.sampling import picking
from pdcluster_worker.model.sampling.picking import (
    NOT_FINITE,
    NOTHING_LEFT,
    PICKED,
    QUANTUM,
    first_tokens,
    pick_tokens,
    token_weights,
)
from pdcluster_worker.model.sampling.rows import Rows
from tests.worker.model.sampling.sampling_cases import (
    naive_kept,
    naive_pick,
    random_logits,
    rows_for,
    weights_of,
)

VOCAB = 24
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.001},
    {"temperature": 2.0, "top_p": 0.999},
    {"temperature": 1.0, "top_k": 3000},
    {"temperature": 1.0, "top_k": 1},
]

# Few different values: ties at every cut.
tied_logits = st.lists(
    st.sampled_from([-20.0, -2.0, -0.0, 0.0, 0.5, 2.0, -math.inf]), min_size=VOCAB, max_size=VOCAB
)
free_logits = st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB)
logit_rows = (
    st.one_of(tied_logits, free_logits).map(torch.tensor).filter(lambda row: row.amax() > -math.inf)
)
settings_of_rows = st.fixed_dictionaries(
    {"temperature": st.floats(0.05, 3.0)},
    optional={
        "top_k": st.integers(1, VOCAB + 2),
        "top_p": st.floats(0.01, 1.0),
        "min_p": st.floats(0.0, 1.0),
    },
)


def rows_at(u, sampling, vocab_size):
    row = rows_for(vocab_size, sampling)
    return Rows(row.inverse_temperature, row.top_k, row.top_p, row.min_p, np.array([u]))


def pick_one(logits, u=0.5, **sampling):
    picks = pick_tokens(logits.view(1, -1), rows_at(u, sampling, len(logits)))
    assert picks.status.tolist() == [PICKED]
    return int(picks.token_ids[0])


@given(logit_rows, settings_of_rows, st.floats(0, 1))
def test_a_pick_is_that_of_the_naive_reading(logits, sampling, u):
    assert pick_one(logits, u, **sampling) == naive_pick(logits, u, **sampling)


@given(logit_rows, settings_of_rows, st.floats(0, 1))
def test_the_size_of_the_first_guess_changes_nothing(logits, sampling, u):
    expected = pick_one(logits, u, **sampling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(picking, "FIRST_GUESS", 2)
        patch.setattr(picking, "WIDER", 2)
        assert pick_one(logits, u, **sampling) == expected


@pytest.mark.parametrize("u", [0.0, 1e-12, 0.5, 1 - 1e-16, 1.0])
def test_top_k_keeps_exactly_k_of_equals_the_lowest_ids_first(u):
    logits = torch.tensor([1.0, 7.0, 7.0, 7.0, 7.0])
    assert pick_one(logits, u, temperature=1.0, top_k=2) in (1, 2)
    assert pick_one(logits, u, temperature=1.0, top_k=1) == 1
    assert pick_one(logits, u, temperature=1.0, top_p=0.4) in (1, 2)


def test_top_k_of_one_is_greedy_at_ties_of_bfloat16():
    logits = random_logits(3, 200, 512, scale=6).bfloat16().float()
    best = logits.topk(2).values
    assert (best[:, 0] == best[:, 1]).sum() >= 3, "this test wants rows whose two best are equal"
    ones = pick_tokens(
        logits, rows_for(512, *[{"temperature": 1.0, "top_k": 1, "seed": n} for n in range(200)])
    )
    greedy = pick_tokens(logits, rows_for(512, *[{"temperature": 0.0}] * 200))
    assert (
        ones.token_ids.tolist()
        == greedy.token_ids.tolist()
        == first_tokens(logits, 1)[:, 0].tolist()
    )


def test_min_p_keeps_all_equals_of_the_last_one_kept():
    logits = torch.tensor([0.0, math.log(0.5), math.log(0.5), math.log(0.4)])
    assert naive_kept(logits, min_p=0.45).keys() == {0, 1, 2}
    drawn = {pick_one(logits, u / 100, temperature=1.0, min_p=0.45) for u in range(100)}
    assert drawn == {0, 1, 2}


@given(logit_rows, st.floats(0.01, 0.999), st.floats(0.2, 3.0))
def test_top_p_leaves_the_smallest_set_that_holds_p(logits, top_p, temperature):
    kept = naive_kept(logits, top_p=top_p, temperature=temperature)
    needed = top_p * math.fsum(weights_of(logits, temperature))
    mass = math.fsum(kept.values())
    assert mass >= needed > mass - min(kept.values())


def test_draws_follow_the_probabilities_over_positions():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20_000, 4).contiguous()
    picks = pick_tokens(
        logits, rows_for(4, *[{"temperature": 1.0, "seed": n} for n in range(20_000)])
    )
    counts = Counter(picks.token_ids.tolist())
    for token_id, expected in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert counts[token_id] / 20_000 == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize(
    ("u", "token_id"), [(0.0, 1), (1e-12, 1), (0.2499, 1), (0.25, 3), (1 - 1e-16, 3), (1.0, 3)]
)
def test_a_draw_skips_tokens_without_probability(u, token_id):
    logits = torch.tensor([-math.inf, math.log(1 / 3), -math.inf, 0.0, -math.inf])
    assert pick_one(logits, u, temperature=1.0) == token_id


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000), st.permutations(range(2 * len(KINDS))), st.integers(1, 2 * len(KINDS)))
def test_a_row_has_the_same_token_in_any_company_and_on_any_number_of_threads(seed, order, size):
    logits = random_logits(seed, 2 * len(KINDS), 33_000, scale=1.5).bfloat16().float()
    rows = rows_for(33_000, *[{**kind, "seed": seed + n} for n, kind in enumerate(KINDS * 2)])
    alone = [
        int(pick_tokens(logits[n : n + 1], rows.take(np.array([n]))).token_ids[0])
        for n in range(len(rows))
    ]
    picked = np.array(order[:size])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            together = pick_tokens(logits[picked], rows.take(picked))
            assert together.token_ids.tolist() == [alone[n] for n in picked]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_a_choice_fails_alone(kind):
    logits = random_logits(1, 6, 4096)
    rows = rows_for(4096, *[kind] * 6)
    expected = pick_tokens(logits, rows).token_ids
    logits[1, 7], logits[2, 7], logits[3], logits[4, 7] = math.nan, math.inf, -math.inf, -math.inf
    picks = pick_tokens(logits, rows)
    assert picks.status.tolist() == [PICKED, NOT_FINITE, NOT_FINITE, NOTHING_LEFT, PICKED, PICKED]
    good = [0, 4, 5]
    assert picks.token_ids[good].tolist() == expected[good].tolist()


def test_weights_are_exponentials_to_a_few_roundings():
    logits = torch.cat(
        [torch.zeros(1), -torch.rand(20_000, generator=torch.Generator().manual_seed(1)) * 30]
    )
    weights = torch.tensor(weights_of(logits), dtype=torch.float64)
    error = (weights - logits.double().exp()).abs()
    assert weights[0] == 1.0
    assert (error <= QUANTUM / 2 + 3e-7 * weights).all()


@pytest.mark.parametrize("value", [-1e30, -math.inf])
@pytest.mark.parametrize("temperature", [1e-5, 1.0, 100.0])
def test_a_hopeless_token_has_no_weight(value, temperature):
    assert weights_of(torch.tensor([3.0, value]), temperature) == [1.0, 0.0]


@given(st.permutations(range(400)), st.floats(0.3, 4.0))
@settings(max_examples=20)
def test_sums_of_weights_have_the_same_bits_in_any_order(order, temperature):
    logits = random_logits(5, 1, 400, scale=8)
    one = torch.tensor([1 / temperature], dtype=torch.float32)
    weights = token_weights(logits, logits.amax(1), one)[0].double()
    running = 0.0
    for place in order:
        running += float(weights[place])
    assert running == float(weights.sum()) == math.fsum(weights.tolist())


@given(st.one_of(tied_logits, free_logits), st.integers(0, VOCAB + 2))
def test_first_tokens_are_those_of_a_stable_sort(logits, count):
    expected = sorted(range(VOCAB), key=lambda n: (-logits[n], n))[:count]
    rows = torch.tensor([logits, [0.0] * VOCAB])
    assert first_tokens(rows, count).tolist() == [expected, list(range(VOCAB))[:count]]
