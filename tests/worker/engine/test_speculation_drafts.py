"""Drafts from a request's own tokens, and the moments at which drafts pay [V30]."""

import pytest

from pdcluster_worker.engine.drafters import NgramDrafter
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.engine.speculation import FIRST_SHARE, AcceptanceRate, DecodeStepTimes
from pdcluster_worker.messages.engine_settings import SpeculationSettings
from pdcluster_worker.messages.requests import SamplingParams

NGRAM = SpeculationSettings(prompt_lookup_max=5, prompt_lookup_min=3)


def request(tokens, name="a"):
    return EngineRequest(name, list(tokens), 2, SamplingParams(max_tokens=99, seed=0))


def drafts(tokens, count=3, settings=NGRAM):
    return NgramDrafter(settings).draft([(request(tokens), count)])[0]


def test_what_followed_the_last_tokens_is_drafted_v30():
    assert drafts([1, 2, 3, 4, 9, 8, 1, 2, 3]) == [4, 9, 8]
    assert drafts([1, 2, 3, 4, 9, 8, 1, 2, 3], count=1) == [4]
    assert drafts([1, 2, 3, 4, 9, 8, 2, 3]) == []  # two tokens are too few
    assert drafts([1, 2]) == drafts([]) == []


def test_longest_match_goes_before_the_earliest_v30():
    """ "1 2 3" stands at 0; "7 1 2 3" and what follows it at 4."""
    assert drafts([1, 2, 3, 50, 7, 1, 2, 3, 60, 61, 62, 7, 1, 2, 3]) == [60, 61, 62]


def test_earliest_of_equal_matches_is_taken_v30():
    assert drafts([1, 2, 3, 50, 51, 52, 1, 2, 3, 60, 61, 62, 1, 2, 3]) == [50, 51, 52]


def test_run_of_one_token_is_continued_as_far_as_it_is_known():
    assert drafts([5, 5, 5, 5]) == [5]
    assert drafts([5] * 9) == [5, 5, 5]  # the longest match begins at 0


def test_single_tokens_are_matched_where_requested():
    assert drafts(
        [4, 7, 4], settings=SpeculationSettings(prompt_lookup_max=1, prompt_lookup_min=1)
    ) == [7, 4]


def test_tokens_of_any_vocabulary_are_drafted():
    big = 1 << 40
    assert drafts([big, 2, 3, big + 7, 9, big, 2, 3]) == [big + 7, 9, big]


def test_text_follows_its_request_and_is_forgotten():
    drafter, grown = NgramDrafter(NGRAM), request([1, 2, 3, 4, 1, 2])
    assert drafter.draft([(grown, 3)]) == [[]]
    assert not drafter.may_follow(grown)
    grown.tokens.append(3)
    assert drafter.may_follow(grown)
    assert drafter.draft([(grown, 3)]) == [[4, 1, 2]]
    drafter.forget("a")
    drafter.forget("never seen")
    assert drafter.draft([(request([7, 8, 9]), 3)]) == [[]]


def times(row_seconds, base=0.010, sizes=(1, 4, 16, 64)):
    made = DecodeStepTimes()
    for _ in range(20):
        for size in sizes:
            made.add(size, base + row_seconds * size)
    return made


def test_drafts_pay_for_one_stream_by_almost_any_share_and_less_in_a_large_batch():
    measured = times(0.0001)
    assert measured.least_share(1) == pytest.approx(0.01, abs=0.005)
    assert measured.least_share(16) == pytest.approx(0.0016 / 0.0116, abs=0.02)
    assert times(0.001).least_share(64) == pytest.approx(0.064 / 0.074, abs=0.03)


def test_rows_that_cost_nothing_always_pay_and_nothing_measured_does_not_hinder():
    assert DecodeStepTimes().least_share(64) == 0.0
    assert times(0.0).least_share(16) < 0.02


def test_steps_of_one_size_leave_a_guess():
    measured = times(0.0, sizes=(16,))
    assert measured.least_share(16) == pytest.approx(16 * 0.02, abs=0.01)


def test_seconds_of_drafting_count():
    measured = times(0.0001)
    before = measured.least_share(1)
    for _ in range(100):
        measured.add_drafting(3, 0.009)
    assert measured.least_share(1) == pytest.approx(before + 0.3, abs=0.02)


def test_share_of_wrong_drafts_falls_and_comes_back_by_and_by():
    share = AcceptanceRate()
    for _ in range(10):
        share.add(3, 0)
    low = share.value
    assert low < 0.06
    share.drift()
    assert low < share.value < low + 0.005
    for _ in range(2000):
        share.drift()
    assert share.value == pytest.approx(FIRST_SHARE, abs=0.01)
    share.add(3, 3)
    assert share.value > FIRST_SHARE
