"""Penalties, biases and bans by hand, and counts that follow a request."""

import math

import pytest
import torch

from pdcluster_worker.model.sampling.penalties import FIRST_CAPACITY, PenaltyState
from tests.worker.model.sampling.sampling_cases import make_request


def adjusted(logits, requests, state=None):
    """The rows as the sampler sees them; also checks that the given ones are what they were."""
    logits = torch.tensor(logits, dtype=torch.float32) if isinstance(logits, list) else logits
    before = logits.clone()
    state = state or PenaltyState(logits.shape[1])
    edits, errors = state.edits(requests)
    assert errors == {}
    with edits.applied(logits) as bad_rows:
        after = logits.clone()
    assert bad_rows.tolist() == []
    assert torch.equal(logits, before)
    return after


def test_penalties_by_hand():
    request = make_request(
        [0, 1, 2, 2, 3], 2, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
    )
    # 0, 1: prompt only, repetition alone.  2: said twice.  3: said once.  4: never.
    expected = torch.tensor([[2.0, -8.0, 2.0 - 1.0 - 0.25, -8.0 - 0.5 - 0.25, 1.0]])
    assert torch.allclose(adjusted([[4.0, -4.0, 4.0, -4.0, 1.0]], [request]), expected)


def test_each_row_gets_its_own_edits_and_a_plain_row_none():
    ends = {"min_tokens": 3, "eos_token_ids": [1], "stop_token_ids": [1, 4]}
    requests = [
        make_request([2, 3], 1, "a", presence_penalty=1.0),
        make_request([0], name="b"),
        make_request([0, 0], 1, "c", logit_bias={2: 2.5, 0: -1.0}, **ends),
        make_request([2, 3], 1, "d", repetition_penalty=2.0),
    ]
    expected = [
        [4.0, 4.0, 4.0, 3.0, 4.0],
        [4.0] * 5,
        [3.0, -math.inf, 6.5, 4.0, -math.inf],
        [4.0, 4.0, 2.0, 2.0, 4.0],
    ]
    assert adjusted([[4.0] * 5] * 4, requests).tolist() == expected


def test_penalty_bias_and_ban_meet_at_one_token():
    request = make_request([2, 2], 1, frequency_penalty=0.5, logit_bias={2: 1.0})
    assert adjusted([[0.0, 0.0, 0.0]], [request]).tolist() == [[0.0, 0.0, 0.5]]
    banned = make_request(
        [2, 2], 1, frequency_penalty=0.5, logit_bias={2: 1.0}, min_tokens=5, eos_token_ids=[2]
    )
    assert adjusted([[0.0, 0.0, 0.0]], [banned]).tolist() == [[0.0, 0.0, -math.inf]]


def test_edits_are_taken_back_when_the_choice_raises():
    logits = torch.zeros(1, 3)
    edits, _ = PenaltyState(3).edits([make_request(logit_bias={1: 4.0})])
    with pytest.raises(RuntimeError, match="device"), edits.applied(logits):
        raise RuntimeError("device lost")
    assert logits.tolist() == [[0.0, 0.0, 0.0]]


def test_counts_follow_the_request_and_are_rebuilt_when_it_is_another():
    state = PenaltyState(6)
    request = make_request([0, 1], 1, frequency_penalty=1.0)
    zeros = torch.zeros(1, 6)
    assert adjusted(zeros, [request], state).tolist() == [[0, -1, 0, 0, 0, 0]]
    request.tokens += [1, 5]
    assert adjusted(zeros, [request], state).tolist() == [[0, -2, 0, 0, 0, -1]]
    # A step that is run again counts nothing twice.
    assert adjusted(zeros, [request], state).tolist() == [[0, -2, 0, 0, 0, -1]]
    shorter = make_request([0, 2], 1, frequency_penalty=1.0)
    assert adjusted(zeros, [shorter], state).tolist() == [[0, 0, -1, 0, 0, 0]]
    state.forget("r")
    state.forget("r")
    assert adjusted(zeros, [request], state).tolist() == [[0, -2, 0, 0, 0, -1]]


def test_counts_are_those_of_a_request_counted_at_once_however_it_grew():
    tokens = torch.randint(
        2000, (3 * FIRST_CAPACITY,), generator=torch.Generator().manual_seed(2)
    ).tolist()
    grown, state = make_request(tokens[:5], 5, repetition_penalty=1.5), PenaltyState(2000)
    for size in (6, 7, FIRST_CAPACITY - 1, FIRST_CAPACITY + 1, 3 * FIRST_CAPACITY):
        grown.tokens[:] = tokens[:size]
        counts = state.counts(grown)
        assert counts.ids.tolist() == list(dict.fromkeys(tokens[:size]))
        assert counts.occurrences.tolist() == [
            tokens[5:size].count(token_id) for token_id in counts.ids
        ]


def test_a_prompt_is_counted_for_the_repetition_penalty_alone():
    counts = PenaltyState(9).counts(make_request([1, 2, 3, 3], 3, presence_penalty=1.0))
    assert (counts.ids.tolist(), counts.occurrences.tolist()) == ([3], [1.0])
    counts = PenaltyState(9).counts(make_request([1, 2, 3], 3, presence_penalty=1.0))
    assert counts.ids.tolist() == []
