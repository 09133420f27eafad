"""The search for engine sizes, on made-up response surfaces."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.bench.tuning import LatencyTargets, SearchResult, Sizes, Trial, TrialResult, search

LIMITS = LatencyTargets(ttft_p90_ms=1000.0, itl_p99_ms=100.0)
START = Sizes(256, 64)
Surface = Callable[[Trial], TrialResult]


def surface(best: Sizes, capacity: float) -> Surface:
    """Sizes hold `capacity` requests a second at `best`, and a third less for each doubling away
    from it.
    """

    def see(trial: Trial) -> TrialResult:
        away = abs(math.log2(trial.sizes.max_batched_tokens / best.max_batched_tokens))
        away += abs(math.log2(trial.sizes.max_sequences / best.max_sequences))
        load = trial.rate / (capacity * (2 / 3) ** away)
        return TrialResult(1000.0 * load, 50.0)

    return see


def found_on(
    see: Surface, start: Sizes = START, rate: float = 1.0, max_trials: int = 60
) -> SearchResult:
    steps = search(start, rate, LIMITS, max_trials)
    trial = next(steps)
    while True:
        try:
            trial = steps.send(see(trial))
        except StopIteration as e:
            found: SearchResult = e.value
            return found


@pytest.mark.parametrize(
    "best", [Sizes(1024, 64), Sizes(256, 16), Sizes(128, 128), Sizes(64, 8), START]
)
def test_search_climbs_to_the_best_sizes(best: Sizes) -> None:
    found = found_on(surface(best, capacity=8.0))

    assert found.best is not None
    assert found.best.trial.sizes == best
    assert 8.0 / 1.5 < found.best.trial.rate <= 8.0


def test_search_goes_down_to_a_rate_that_holds() -> None:
    found = found_on(surface(START, capacity=0.3), rate=4.0)

    assert found.best is not None
    assert 0.15 < found.best.trial.rate <= 0.3


def test_search_finds_nothing_where_no_rate_holds_and_says_what_was_closest() -> None:
    found = found_on(lambda trial: TrialResult(10.0, 150.0 + trial.rate), rate=1.0)

    assert found.best is None
    assert found.closest(LIMITS).trial.rate == min(one.trial.rate for one in found.tried)
    assert len(found.tried) < 10


def test_failed_answers_are_not_inside_the_limits() -> None:
    assert not TrialResult(1.0, 1.0, num_failed=1).meets(LIMITS)
    assert TrialResult(1000.0, 100.0).meets(LIMITS)
    assert not TrialResult(1.0, 100.1).meets(LIMITS)


def test_sizes_that_the_object_refuses_are_no_neighbours() -> None:
    assert Sizes(64, 64).neighbours() == [Sizes(128, 64), Sizes(64, 32)]
    assert Sizes(16, 1).neighbours() == [Sizes(32, 1), Sizes(16, 2)]


def test_noise_is_not_climbed() -> None:
    """A neighbour that holds the same rate is not taken."""
    found = found_on(lambda trial: TrialResult(1000.0 if trial.rate <= 1.0 else 2000.0, 1.0))

    assert found.best is not None
    assert found.best.trial == Trial(START, 1.0)


@given(
    st.builds(Sizes, st.sampled_from([32, 256, 2048]), st.sampled_from([1, 8, 32])),
    st.floats(0.01, 100.0),
    st.integers(1, 25),
)
def test_search_ends_within_its_trials_and_only_claims_what_it_saw(
    best: Sizes, capacity: float, max_trials: int
) -> None:
    found = found_on(surface(best, capacity), max_trials=max_trials)

    assert 1 <= len(found.tried) <= max_trials
    assert all(one.trial.sizes.is_valid for one in found.tried)
    holding = [one for one in found.tried if one.result.meets(LIMITS)]
    if found.best is None:
        assert holding == []
    else:
        assert found.best in holding
        assert found.best.trial.rate == max(one.trial.rate for one in holding)


@pytest.mark.parametrize("better", ["sarathi", "simple-chunking"])
def test_search_finds_the_better_scheduler_and_then_its_sizes(better: str) -> None:
    plain = surface(Sizes(512, 64), capacity=8.0)

    def see(trial: Trial) -> TrialResult:
        rate = trial.rate / (1.3 if trial.sizes.scheduler == better else 1.0)
        return plain(replace(trial, rate=rate))

    found = found_on(see)

    assert found.best is not None
    assert found.best.trial.sizes == Sizes(512, 64, better)


def test_a_scheduler_that_holds_as_much_as_the_files_is_not_taken() -> None:
    """Though it holds more than what the file's was last seen to hold."""
    found = found_on(surface(START, capacity=1.4))

    assert found.best is not None
    assert found.best.trial.sizes == START
    assert 1.4 / 1.1 < found.best.trial.rate <= 1.4
