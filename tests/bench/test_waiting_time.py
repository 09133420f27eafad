"""The simulated engine and load of `bench/waiting_time.py`, and the shape of its two
experiments.
"""

from math import inf
from statistics import mean, pstdev

import pytest
from waiting_time import PRESETS, decided, probed
from waiting_time_engine import SimulatedServer, StepCost
from waiting_time_load import ATTAINMENT, PAPER, Group, jobs
from waiting_time_runs import forecasters, forecasting


def test_answers_are_bimodal_as_published() -> None:
    """[R4]: 3 to 8000 tokens, below 500 or above 3500, a coefficient of variation of 1.02."""
    lengths = [job.output_tokens for job in jobs([Group("I", 4000, 1.0, 2618)], "lengths")]

    assert mean(lengths) == pytest.approx(2618, rel=0.05)
    assert pstdev(lengths) / mean(lengths) == pytest.approx(1.02, abs=0.05)
    assert all(3 <= tokens <= 500 or 3500 <= tokens <= 8000 for tokens in lengths)


def test_the_load_is_that_of_the_document() -> None:
    """[R4]"""
    assert [(g.name, g.num_requests, g.slo_seconds) for g in PAPER] == [
        ("I", 10, 430),
        ("B1", 15, 520),
        ("B2", 20, 860),
        ("B3", 15, 1320),
    ]
    assert sum(g.num_requests for g in ATTAINMENT) == 85
    assert jobs(PAPER, "s")[7].output_tokens == jobs(PAPER, "s")[7].output_tokens


def test_the_simulated_probe_is_the_published_one() -> None:
    """[R4]: equal requests take 8.81 ms a token at first and 10.08 at last."""
    first, last = (float(word) for word in probed().split() if word[:3] == "0.0")

    assert (first, last) == (pytest.approx(0.00881, rel=0.01), pytest.approx(0.01008, rel=0.01))


def test_steps_of_many_are_those_steps_one_by_one() -> None:
    cost = StepCost()
    one_by_one = sum(cost.steps(1, 3, 100 + 3 * number, 5) for number in range(20))

    assert cost.steps(20, 3, 100, 5) == pytest.approx(one_by_one)


def test_an_evicted_job_goes_on_after_the_tokens_that_it_has() -> None:
    server = SimulatedServer()
    (job,) = jobs([Group("g", 1, 1.0, 1000, is_bimodal=False)], "evicted")
    server.start(job)
    server.advance(until=2.0)
    tokens = job.flight.num_tokens
    server.evict(job)
    server.start(job)

    assert (job.flight.num_tokens, job.num_evicted) == (tokens + 1, 1)
    assert server.advance(inf) == [job]
    assert job.flight.num_tokens == job.output_tokens


def test_ours_is_closer_than_the_documents_estimators_where_requests_run_at_once() -> None:
    server, columns = SimulatedServer(), forecasters(PRESETS, 8)
    forecasting(server, jobs(PAPER, "earlier"), columns, 8, every_seconds=inf)
    found = forecasting(server, jobs(PAPER, "now"), columns, 8, every_seconds=20.0)
    error = {name: mean(forecasts.mape(name) for forecasts in found) for name in columns}

    assert error["loadAware"] < 15 < min(error["preset"], error["d_eff"], error["d_eff + mu"])


def test_attainment_rises_because_wrong_evictions_stop() -> None:
    """[R4]: 54.1 -> 71.8 % of 85 requests; the time of a token alone changes nothing."""
    preset, decode, both, ours = (
        decided(name, "slo 0", ATTAINMENT)
        for name in ("preset", "d_eff", "d_eff + mu", "loadAware")
    )

    assert [round(outcome.attainment, 1) for outcome in (preset, decode, both, ours)] == [
        54.1,
        54.1,
        71.8,
        71.8,
    ]
    assert (preset.wrong_evictions, both.wrong_evictions, ours.wrong_evictions) == (1, 0, 0)
    assert (preset.in_time["I"], both.in_time["I"]) == (0, 15)
