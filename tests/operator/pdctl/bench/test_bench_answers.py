"""The formulas of an answer, whose times are written out."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.bench import load
from pdctl.bench.load import LatencyLimits, LoadResult, RequestResult, percentile

SLO = LatencyLimits(ttft_seconds=2.0, tpot_seconds=0.1)


def send(
    *chunk_seconds: float, scheduled: float = 0.0, num_tokens: int | None = None
) -> RequestResult:
    return RequestResult(
        scheduled,
        scheduled,
        chunk_seconds,
        len(chunk_seconds) if num_tokens is None else num_tokens,
    )


def failed(*chunk_seconds: float) -> RequestResult:
    return RequestResult(0.0, 0.0, chunk_seconds, 0, "HTTP 503")


def test_answers_examples_hold() -> None:
    assert doctest.testmod(load).failed == 0


def test_answer_splits_its_time_into_ttft_and_tpot() -> None:
    one = send(1.5, 1.6, 1.9, scheduled=1.0)

    assert one.ttft_seconds == pytest.approx(0.5)
    assert one.tpot_seconds == pytest.approx(0.2)
    assert one.gaps_seconds == pytest.approx([0.1, 0.3])


def test_answer_ttft_counts_from_the_schedule_when_it_was_sent_late() -> None:
    late = RequestResult(
        scheduled_seconds=1.0, started_seconds=1.4, chunk_seconds=(1.5,), num_tokens=1
    )

    assert late.ttft_seconds == pytest.approx(0.5)


def test_answer_tpot_divides_by_tokens_not_chunks() -> None:
    assert send(1.0, 2.0, num_tokens=5).tpot_seconds == pytest.approx(0.25)


def test_answer_of_one_token_has_no_tpot() -> None:
    assert send(1.0).tpot_seconds is None
    assert SLO.is_met_by(send(1.0))


@pytest.mark.parametrize(
    ("one", "is_good"),
    [
        (send(2.0, 2.0625), True),
        (send(2.001, 2.1), False),
        (send(0.5, 0.75), False),
        (failed(0.1, 0.2), False),
        (failed(), False),
    ],
)
def test_answer_is_good_inside_both_slos_only(one: RequestResult, is_good: bool) -> None:
    assert SLO.is_met_by(one) == is_good


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentile_equals_numpys_default(values: list[float], percent: float) -> None:
    numpy = pytest.importorskip("numpy")

    assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)))


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)


def test_slo_without_limits_wants_a_complete_answer_only() -> None:
    assert LatencyLimits().is_met_by(send(9.0, 99.0))
    assert not LatencyLimits().is_met_by(failed(0.1))
    assert not LatencyLimits(e2e_seconds=1.0).is_met_by(send(0.5, 1.5))


def test_run_has_latencies_of_complete_answers() -> None:
    run = LoadResult((send(0.1, 0.3), failed(9.0)), 1.0, 0.0)

    found = {
        name: [round(value, 9) for value in values]
        for name, values in run.latencies_seconds.items()
    }
    assert found == {"ttft": [0.1], "tpot": [0.2], "itl": [0.2], "e2el": [0.3]}
