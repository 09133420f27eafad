"""Latencies of a new revision beside the old one's, from rounds of scrapes."""

import pytest

from pdcluster_api.plan.autoscale.attainment import GateTotals, attainment
from pdcluster_api.plan.autoscale.histogram import LatencyHistogram
from pdcluster_api.plan.autoscale.values import PoolSample, Windows
from pdcluster_api.plan.observed.state import Attainment, RevisionLatency
from pdcluster_schema.autoscale import AutoscaleSpec

BOUNDS = (0.5, 1.0, 2.0)
SPEC = AutoscaleSpec.model_validate(
    {
        "mode": "Advise",
        "objective": {"ttft": {"seconds": 1.0, "percentile": 50}},
        "decode": {"tpotSeconds": 0.1},
    }
)
DECODE, PREFILL = ("decode", "cpu"), ("prefill", "cpu")
TTFT, ITL = "time_to_first_token_seconds_p50", "inter_token_latency_seconds"


def sample(at: float, **ttft: tuple[float, float]) -> PoolSample:
    """One round; of each workload (number, seconds of each first token), and as many tokens."""
    found = {
        name: {
            "ttft": LatencyHistogram.of(BOUNDS, [(number, seconds)]),
            "itl": LatencyHistogram.of(BOUNDS, [(number, seconds / 10)]),
        }
        for name, (number, seconds) in ttft.items()
    }
    return PoolSample(at, by_workload=found)


def totals(windows: Windows, since: float = 0.0) -> GateTotals:
    return GateTotals(since).with_rounds(windows)


def test_each_revision_has_its_own_percentile_and_mean():
    rounds = [sample(0.0), sample(5.0, a=(40, 0.4), b=(30, 2.0)), sample(10.0, a=(10, 0.4))]

    found = attainment(SPEC, {"b"}, totals({DECODE: rounds}))

    assert found == Attainment(
        30,
        (
            RevisionLatency(TTFT, 1.0, pytest.approx(1.5), pytest.approx(0.25)),
            RevisionLatency(ITL, 0.1, pytest.approx(0.2), pytest.approx(0.04)),
        ),
    )


def test_rounds_that_began_before_the_gate_do_not_count():
    rounds = [sample(0.0), sample(5.0, b=(100, 2.0)), sample(10.0, b=(25, 0.4))]

    found = attainment(SPEC, {"b"}, totals({DECODE: rounds}, 2.0))

    assert found.num_requests == 25
    assert found.latencies[0].new == pytest.approx(0.25)


def test_pools_that_answer_are_added_and_prefill_is_not_looked_at():
    rounds = [sample(0.0), sample(5.0, b=(15, 0.4))]
    other = [sample(0.0), sample(5.0, c=(15, 0.4))]
    windows = {DECODE: rounds, ("decode", "gpu"): other, PREFILL: rounds}

    assert attainment(SPEC, {"b", "c"}, totals(windows)).num_requests == 30


def test_too_few_samples_of_a_percentile_are_none():
    rounds = [sample(0.0), sample(5.0, a=(19, 0.4), b=(19, 0.4))]

    found = attainment(SPEC, {"b"}, totals({DECODE: rounds}))

    assert (found.num_requests, found.latencies[0]) == (19, RevisionLatency(TTFT, 1.0, None, None))


def test_nothing_was_scraped_yet():
    assert attainment(SPEC, {"b"}, totals({})).num_requests == 0


def test_requests_add_up_beyond_the_rounds_that_are_kept():
    found, rounds = GateTotals(0.0), [sample(0.0)]
    for number in range(1, 201):
        rounds = [*rounds, sample(5.0 * number, b=(2, 0.4), a=(1, 0.4))][-60:]
        found = found.with_rounds({DECODE: rounds})

    assert found == found.with_rounds({DECODE: rounds})
    assert attainment(SPEC, {"b"}, found).num_requests == 400
    assert attainment(SPEC, {"a"}, found).num_requests == 200
