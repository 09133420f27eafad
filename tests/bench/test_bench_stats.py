"""Counts of the bench over answers and rounds."""

import pytest
import stats
from stats import EngineCounters, Spread, ratios, spread, summarize

from pdctl.bench.load import LoadResult, RequestResult


def answer(
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


def test_summary_counts_failures_in_rates_and_not_in_latencies() -> None:
    run = LoadResult(
        (answer(0.1, 0.15), answer(3.0, 3.05), failed(0.01)),
        duration_seconds=4.0,
        client_cpu_seconds=0.1,
    )

    summary = summarize(run)

    assert summary["TTFT p50 ms"] == pytest.approx(1550.0)
    assert summary["ITL p99 ms"] == pytest.approx(50.0)
    assert summary["TTFT mean ms"] == pytest.approx(1550.0)
    assert summary[stats.STREAM_RATE] == pytest.approx(20.0)
    assert summary["output tokens/s"] == pytest.approx(1.0)
    assert summary["requests/s"] == pytest.approx(0.5)
    assert summary["goodput good/s"] == pytest.approx(0.25)
    assert summary["good share of sent"] == pytest.approx(1 / 3)
    assert run.failures == ["HTTP 503"]


def test_summary_without_a_complete_answer_has_rates_only() -> None:
    assert summarize(LoadResult((failed(), failed()), 2.0, 0.0)) == dict.fromkeys(stats.RATES, 0.0)


def test_summary_names_every_figure_once() -> None:
    assert (
        tuple(summarize(LoadResult((answer(0.1, 0.2),), 1.0, 0.0))) == stats.LATENCIES + stats.RATES
    )


def test_start_delay_is_the_generators_lateness() -> None:
    late = RequestResult(
        scheduled_seconds=1.0, started_seconds=1.4, chunk_seconds=(1.5,), num_tokens=1
    )

    assert stats.start_delays(LoadResult((late,), 1.0, 0.0)) == pytest.approx([0.4])


def test_chunks_per_token_shows_tokens_without_text() -> None:
    assert (
        stats.chunks_per_token(LoadResult((answer(1.0, 2.0, num_tokens=4), failed(1.0)), 2.0, 0.0))
        == 0.5
    )
    assert stats.chunks_per_token(LoadResult((failed(),), 2.0, 0.0)) == 0.0


def test_spread_keeps_the_extremes() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_ratios_are_taken_round_by_round() -> None:
    assert ratios([2.0, 9.0, 1.0], [1.0, 3.0, 0.0]) == [2.0, 3.0]


def test_engine_counters_difference_gives_overhead_of_a_step() -> None:
    used = EngineCounters(30, 3.0, 0.05, 4).since(EngineCounters(10, 1.0, 0.01, 1))

    assert used == EngineCounters(20, 2.0, pytest.approx(0.04), 3)
    assert used.overhead_ms_per_step == pytest.approx(2.0)
    assert EngineCounters(0, 0.0, 0.0, 0).overhead_ms_per_step == 0.0
