"""The sampler: an outcome a row, draws that depend on (seed, position) alone, log probabilities."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_worker.engine.ports import Sample
from pdcluster_worker.errors import RequestError
from pdcluster_worker.model.sampling.rows import _mix, uniforms
from pdcluster_worker.model.sampling.sampler import Sampler
from tests.worker.model.sampling.sampling_cases import make_request, random_logits

VOCAB = 24


def sample_one(logits, request):
    return Sampler(logits.shape[-1]).sample(logits.view(1, -1), [request])[0]


def test_greedy_takes_the_first_of_the_best():
    logits = torch.zeros(VOCAB)
    logits[[5, 9]] = 2.0
    assert sample_one(logits, make_request()).token_id == 5
    assert sample_one(logits, make_request(logit_bias={0: -1.0})).token_id == 5


@settings(max_examples=30)
@given(st.integers(0, 1000), st.permutations(range(7)), st.integers(1, 7))
def test_a_request_gets_the_same_sample_in_any_batch(seed, order, size):
    options = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": seed},
        {"temperature": 0.7, "seed": seed + 1, "top_p": 0.8, "logprobs": 1},
        {"temperature": 1.3, "seed": seed + 2, "top_k": 5, "min_p": 0.01},
        {"temperature": 1.0, "seed": seed + 3, "presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 0.0, "frequency_penalty": 0.5, "logprobs": 3},
        {"temperature": 0.0, "logit_bias": {VOCAB: 1.0}},
    ]
    logits = random_logits(seed, len(options), VOCAB)
    requests = [
        make_request([3, 4, 4, 5], 2, name=str(n), **option) for n, option in enumerate(options)
    ]
    alone = [sample_one(logits[n], request) for n, request in enumerate(requests)]
    picked = order[:size]
    together = Sampler(VOCAB).sample(logits[picked], [requests[n] for n in picked])
    assert [str(one) for one in together] == [str(alone[n]) for n in picked]


def test_a_draw_depends_on_position_and_seed():
    logits = torch.zeros(512)
    tokens = {
        sample_one(logits, make_request(range(length), seed=seed, temperature=1.0)).token_id
        for length in range(1, 9)
        for seed in range(8)
    }
    assert len(tokens) > 40


@given(st.lists(st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 2**31)), min_size=1))
def test_uniforms_are_inside_the_open_interval_and_of_each_pair_alone(pairs):
    found = uniforms(*zip(*pairs, strict=True)).tolist()
    assert all(0.0 < number < 1.0 for number in found)
    assert found == [uniforms([seed], [position])[0] for seed, position in pairs]


def test_uniforms_are_flat_over_seeds_and_over_positions():
    many, same = range(20_000), [7] * 20_000
    for numbers in (uniforms(many, same), uniforms(same, many)):
        counts = Counter(int(number * 20) for number in numbers)
        assert all(abs(count - 1000) < 160 for count in counts.values())  # five standard deviations


def test_uniforms_are_splitmix64_and_the_same_on_every_machine():
    # published test vector of SplitMix64, seed 1234567
    assert _mix(np.array([1234567], np.uint64)).tolist() == [6457827717110365317]
    assert uniforms([0], [0])[0] == 0.6524484863740323


def test_min_tokens_bans_every_end_until_it_is_reached():
    logits = torch.tensor([0.0, 1.0, 9.0, 8.0])
    ends = {"eos_token_ids": [2], "stop_token_ids": [3], "min_tokens": 2}
    assert sample_one(logits, make_request([0, 0], num_prompt=1, **ends)).token_id == 1
    assert sample_one(logits, make_request([0, 0, 0], num_prompt=1, **ends)).token_id == 2


def test_min_tokens_with_nothing_left_fails_for_that_request():
    request = make_request([0], min_tokens=5, stop_token_ids=[0, 1, 2], temperature=1.0)
    error = sample_one(torch.zeros(3), request)
    assert isinstance(error, RequestError)
    assert (error.code, str(error)) == (
        "no_token_left",
        "request r: no token is left to choose from: lower min_tokens",
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_bias_forces_and_forbids(temperature):
    logits = random_logits(3, 1, VOCAB)[0]
    best = int(logits.argmax())
    assert (
        sample_one(logits, make_request(temperature=temperature, logit_bias={7: 100.0})).token_id
        == 7
    )
    for seed in range(20):
        assert (
            sample_one(
                logits, make_request(temperature=temperature, seed=seed, logit_bias={best: -100.0})
            ).token_id
            != best
        )


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_bias_outside_the_vocabulary_is_an_error_of_its_row(token_id):
    requests = [
        make_request(name="a"),
        make_request(name="b", logit_bias={3: 9.0, token_id: 1.0}),
        make_request(name="c"),
    ]
    first, error, third = Sampler(VOCAB).sample(torch.zeros(3, VOCAB), requests)
    assert (first, third) == (Sample(0), Sample(0))
    assert isinstance(error, RequestError)
    assert error.code == "unknown_token_ids"
    assert str(error) == f"request b: logit_bias names token {token_id}, but token ids are 0 to 23"


def test_a_stop_token_outside_the_vocabulary_is_an_error_while_it_would_be_banned():
    request = make_request([1], stop_token_ids=[VOCAB], min_tokens=1)
    error = sample_one(torch.zeros(VOCAB), request)
    assert "stop_token_ids names token 24" in str(error)
    request.tokens.append(1)
    assert sample_one(torch.zeros(VOCAB), request) == Sample(0)


def test_logprobs_are_those_of_the_model_before_any_change():
    logits = torch.tensor([math.log(0.6), math.log(0.3), math.log(0.1)])
    sample = sample_one(
        logits, make_request(temperature=1.0, seed=1, logit_bias={2: 100.0}, logprobs=2)
    )
    assert sample.token_id == 2
    assert sample.logprob == pytest.approx(math.log(0.1), abs=1e-5)
    assert [token_id for token_id, _ in sample.top_logprobs] == [0, 1]
    assert [logprob for _, logprob in sample.top_logprobs] == pytest.approx(
        [math.log(0.6), math.log(0.3)], abs=1e-5
    )


def test_logprobs_are_as_many_as_there_are_tokens_and_as_requested():
    zero = sample_one(torch.zeros(3), make_request(logprobs=0))
    assert (zero.logprob is not None, zero.top_logprobs) == (True, ())
    assert sample_one(torch.zeros(3), make_request()).logprob is None
    assert len(sample_one(torch.zeros(3), make_request(logprobs=20)).top_logprobs) == 3


def test_logprobs_are_those_of_log_softmax_rounded_once():
    logits = random_logits(8, 3, 20_000, scale=4)
    requests = [make_request(name=str(n), logprobs=count) for n, count in enumerate((0, 20, 3))]
    samples = Sampler(20_000).sample(logits, requests)
    expected = torch.log_softmax(logits.double(), 1)
    assert [len(sample.top_logprobs) for sample in samples] == [0, 20, 3]
    for row, sample in zip(expected, samples, strict=True):
        for token_id, logprob in [(sample.token_id, sample.logprob), *sample.top_logprobs]:
            assert logprob == pytest.approx(float(row[token_id]), abs=2e-6)
            assert torch.tensor(logprob, dtype=torch.float64).float().item() == logprob


def test_the_greedy_token_is_the_first_of_its_top_logprobs_where_equals_abound():
    logits = random_logits(4, 200, 512, scale=6).bfloat16().float()
    best = logits.topk(2).values
    assert (best[:, 0] == best[:, 1]).sum() >= 3, "this test wants rows whose two best are equal"
    requests = [make_request(name=str(n), logprobs=5) for n in range(200)]
    for sample in Sampler(512).sample(logits, requests):
        assert sample.token_id == sample.top_logprobs[0][0]
        assert sample.logprob == sample.top_logprobs[0][1]
        assert list(sample.top_logprobs) == sorted(
            sample.top_logprobs, key=lambda pair: (-pair[1], pair[0])
        )


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "top_p": 0.5}, {"presence_penalty": 1.0}, {"logprobs": 2}]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone_and_names_its_request(bad, options):
    logits = random_logits(2, 3, VOCAB)
    requests = [make_request(name=name, **options) for name in ("first", "second", "third")]
    expected = Sampler(VOCAB).sample(logits, requests)
    logits[1, 3] = bad
    first, error, third = Sampler(VOCAB).sample(logits, requests)
    assert [first, third] == [expected[0], expected[2]]
    assert isinstance(error, RequestError)
    assert (error.code, str(error)) == (
        "not_finite",
        "request second: the model's logits are not finite after 2 tokens",
    )


@pytest.mark.parametrize("options", [{}, {"min_tokens": 9, "eos_token_ids": [3]}])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_ban_does_not_hide_what_is_the_models_failure(value, options):
    """One that is NaN, or a row without any logit."""
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 3] = value
    (error,) = Sampler(VOCAB).sample(logits, [make_request(**options)])
    assert error.code == "not_finite"


@pytest.mark.parametrize("sampling", [{"temperature": 1e-9}, {"temperature": 1.0, "top_k": 1}])
def test_tiny_temperature_and_top_k_of_one_are_greedy(sampling):
    logits = random_logits(2, 1, VOCAB)[0]
    assert sample_one(logits, make_request(**sampling)).token_id == int(logits.argmax())
