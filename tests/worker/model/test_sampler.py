"""The sampler: hand-computed penalties, exact exclusions, and draws that depend on (seed, position) alone."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_worker.engine.messages import Sampling
from pdcluster_worker.engine.request import Request
from pdcluster_worker.model.penalties import PenaltyState, adjust
from pdcluster_worker.model.randomness import _mix, uniform
from pdcluster_worker.model.sampler import Sampler, draw, filter_probabilities

VOCAB = 24


def make_request(tokens=(1, 2), num_prompt=None, name="r", **sampling):
    options = {"max_tokens": 100, "seed": 0, "temperature": 0.0, **sampling}
    return Request(name, list(tokens), len(tokens) if num_prompt is None else num_prompt, Sampling(**options))


def rows_of(seed, num_rows, vocab=VOCAB):
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sample_one(logits, request):
    return Sampler(logits.shape[-1]).sample(logits.view(1, -1), [request])[0]


logit_rows = st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB).map(torch.tensor)


def test_greedy_takes_the_first_of_the_best():
    logits = torch.zeros(VOCAB)
    logits[[5, 9]] = 2.0
    assert sample_one(logits, make_request()).token_id == 5
    assert sample_one(logits, make_request(logit_bias={0: -1.0})).token_id == 5


@given(logit_rows, st.integers(1, VOCAB + 2))
def test_top_k_leaves_only_the_k_best_and_their_equals(logits, k):
    kept = filter_probabilities(logits, Sampling(max_tokens=1, seed=0, top_k=k)) > 0
    kth = torch.softmax(logits.double(), 0).sort(descending=True).values[min(k, VOCAB) - 1]
    assert torch.equal(kept, torch.softmax(logits.double(), 0) >= kth)


@given(logit_rows, st.floats(0.01, 1.0), st.floats(0.2, 3.0))
def test_top_p_leaves_the_smallest_set_that_holds_p(logits, top_p, temperature):
    probabilities = torch.softmax(logits.double() / temperature, 0)
    kept = filter_probabilities(logits, Sampling(max_tokens=1, seed=0, top_p=top_p, temperature=temperature)) > 0
    assert probabilities[kept].sum() >= top_p - 1e-9
    least = probabilities[kept].min()
    assert torch.equal(kept, probabilities >= least)
    assert probabilities[probabilities > least].sum() < top_p + 1e-9


@given(logit_rows, st.floats(0.0, 1.0))
def test_min_p_leaves_only_tokens_near_the_best(logits, min_p):
    probabilities = torch.softmax(logits.double(), 0)
    kept = filter_probabilities(logits, Sampling(max_tokens=1, seed=0, min_p=min_p)) > 0
    assert torch.equal(kept, probabilities >= probabilities.max() * min_p)


def test_top_p_is_exact_when_the_nucleus_is_most_of_a_large_vocabulary():
    logits = torch.randn(10_000, generator=torch.Generator().manual_seed(1)) * 0.1
    probabilities = torch.softmax(logits.double(), 0)
    kept = filter_probabilities(logits, Sampling(max_tokens=1, seed=0, top_p=0.9)) > 0
    assert probabilities[kept].sum() >= 0.9 > probabilities[kept].sum() - probabilities[kept].min()


@given(logit_rows, st.integers(0, 2**64 - 1), st.integers(0, 5), st.floats(0.1, 1.0), st.floats(0.0, 0.5))
def test_an_excluded_token_is_never_drawn(logits, seed, k, top_p, min_p):
    sampling = {"seed": seed, "temperature": 1.0, "top_k": k, "top_p": top_p, "min_p": min_p}
    token_id = sample_one(logits, make_request(**sampling)).token_id
    assert filter_probabilities(logits, Sampling(max_tokens=1, **sampling))[token_id] > 0


@settings(max_examples=30)
@given(st.integers(0, 1000), st.permutations(range(6)), st.integers(1, 6))
def test_a_request_gets_the_same_token_in_any_batch(seed, order, size):
    options = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": seed},
        {"temperature": 0.7, "seed": seed + 1, "top_p": 0.8},
        {"temperature": 1.3, "seed": seed + 2, "top_k": 5, "min_p": 0.01},
        {"temperature": 1.0, "seed": seed + 3, "presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 0.0, "frequency_penalty": 0.5, "logprobs": 3},
    ]
    logits = rows_of(seed, len(options))
    requests = [make_request([3, 4, 4, 5], 2, name=str(n), **option) for n, option in enumerate(options)]
    alone = [sample_one(logits[n], request) for n, request in enumerate(requests)]
    picked = order[:size]
    together = Sampler(VOCAB).sample(logits[picked], [requests[n] for n in picked])
    assert together == [alone[n] for n in picked]


def test_a_draw_depends_on_position_and_seed():
    logits = torch.zeros(512)
    tokens = {
        sample_one(logits, make_request(range(length), seed=seed, temperature=1.0)).token_id for length in range(1, 9) for seed in range(8)
    }
    assert len(tokens) > 40


def test_draws_follow_the_probabilities_over_positions():
    logits = torch.tensor([math.log(0.5), math.log(0.3), math.log(0.15), math.log(0.05)])
    probabilities = filter_probabilities(logits, Sampling(max_tokens=1, seed=0))
    counts = Counter(draw(probabilities, uniform(1234, position)) for position in range(20_000))
    for token_id, expected in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert counts[token_id] / 20_000 == pytest.approx(expected, abs=0.015)


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**20))
def test_uniform_is_inside_the_open_interval_and_repeats(seed, position):
    assert 0.0 < uniform(seed, position) < 1.0
    assert uniform(seed, position) == uniform(seed, position)


def test_uniform_is_flat_over_seeds_and_over_positions():
    for numbers in ([uniform(seed, 7) for seed in range(20_000)], [uniform(7, position) for position in range(20_000)]):
        counts = Counter(int(number * 20) for number in numbers)
        assert all(abs(count - 1000) < 160 for count in counts.values())  # five standard deviations


def test_uniform_is_splitmix64_and_the_same_on_every_machine():
    assert _mix(1234567) == 6457827717110365317  # published test vector of SplitMix64, seed 1234567
    assert uniform(0, 0) == 0.6524484863740323


@pytest.mark.parametrize(("u", "token_id"), [(1e-12, 1), (0.2499, 1), (0.25, 3), (1 - 1e-16, 3)])
def test_draw_skips_tokens_without_probability(u, token_id):
    assert draw(torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], dtype=torch.float64), u) == token_id


def test_draw_at_the_very_end_takes_the_last_possible_token():
    assert draw(torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64), 1.0) == 1


def test_penalties_by_hand():
    request = make_request([0, 1, 2, 2, 3], num_prompt=2, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    logits = torch.tensor([4.0, -4.0, 4.0, -4.0, 1.0])
    # 0, 1: prompt only, repetition alone.  2: said twice.  3: said once.  4: never.
    expected = torch.tensor([2.0, -8.0, 2.0 - 1.0 - 0.25, -8.0 - 0.5 - 0.25, 1.0])
    assert torch.allclose(adjust(logits, request, PenaltyState(5)), expected)
    assert logits.tolist() == [4.0, -4.0, 4.0, -4.0, 1.0]


def test_counts_follow_the_request_and_are_rebuilt_when_it_is_another():
    state = PenaltyState(6)
    request = make_request([0, 1], num_prompt=1, frequency_penalty=1.0)
    zeros = torch.zeros(6)
    assert adjust(zeros, request, state).tolist() == [0, -1, 0, 0, 0, 0]
    request.tokens += [1, 5]
    assert adjust(zeros, request, state).tolist() == [0, -2, 0, 0, 0, -1]
    assert adjust(zeros, request, state).tolist() == [0, -2, 0, 0, 0, -1]  # a step that is run again counts nothing twice
    shorter = make_request([0, 2], num_prompt=1, frequency_penalty=1.0)
    assert adjust(zeros, shorter, state).tolist() == [0, 0, -1, 0, 0, 0]
    state.forget("r")
    state.forget("r")
    assert adjust(zeros, request, state).tolist() == [0, -2, 0, 0, 0, -1]


def test_min_tokens_bans_every_end_until_it_is_reached():
    logits = torch.tensor([0.0, 1.0, 9.0, 8.0])
    ends = {"eos_token_ids": [2], "stop_token_ids": [3], "min_tokens": 2}
    assert sample_one(logits, make_request([0, 0], num_prompt=1, **ends)).token_id == 1
    assert sample_one(logits, make_request([0, 0, 0], num_prompt=1, **ends)).token_id == 2


def test_min_tokens_with_nothing_left_fails_for_that_request():
    request = make_request([0], min_tokens=5, stop_token_ids=[0, 1, 2], temperature=1.0)
    with pytest.raises(ValueError, match="request r: no token is left"):
        sample_one(torch.zeros(3), request)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_bias_forces_and_forbids(temperature):
    logits = rows_of(3, 1)[0]
    best = int(logits.argmax())
    assert sample_one(logits, make_request(temperature=temperature, logit_bias={7: 100.0})).token_id == 7
    for seed in range(20):
        assert sample_one(logits, make_request(temperature=temperature, seed=seed, logit_bias={best: -100.0})).token_id != best


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_bias_outside_the_vocabulary_is_an_error(token_id):
    with pytest.raises(ValueError, match=f"logit_bias names token {token_id}"):
        sample_one(torch.zeros(VOCAB), make_request(logit_bias={token_id: 1.0}))


def test_logprobs_are_those_of_the_model_before_any_change():
    logits = torch.tensor([math.log(0.6), math.log(0.3), math.log(0.1)])
    sample = sample_one(logits, make_request(temperature=1.0, seed=1, logit_bias={2: 100.0}, logprobs=2))
    assert sample.token_id == 2
    assert sample.logprob == pytest.approx(math.log(0.1), abs=1e-5)
    assert [token_id for token_id, _ in sample.top_logprobs] == [0, 1]
    assert [logprob for _, logprob in sample.top_logprobs] == pytest.approx([math.log(0.6), math.log(0.3)], abs=1e-5)


def test_logprobs_zero_gives_the_chosen_tokens_alone_and_none_gives_nothing():
    logits = rows_of(1, 1)[0]
    zero = sample_one(logits, make_request(logprobs=0))
    assert zero.logprob is not None
    assert zero.top_logprobs == ()
    assert sample_one(logits, make_request()).logprob is None


def test_more_logprobs_than_tokens_gives_them_all():
    assert len(sample_one(torch.zeros(3), make_request(logprobs=20)).top_logprobs) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_names_its_request(bad):
    logits = torch.zeros(2, VOCAB)
    logits[1, 3] = bad
    with pytest.raises(ValueError, match="request second: the model's logits are not finite"):
        Sampler(VOCAB).sample(logits, [make_request(name="first"), make_request(name="second")])


def test_tiny_temperature_is_greedy():
    logits = rows_of(2, 1)[0]
    assert sample_one(logits, make_request(temperature=1e-9)).token_id == int(logits.argmax())
