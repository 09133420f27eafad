"""Two pages of one worker to rates and means, across restarts."""

from dataclasses import replace

import pytest

from pdcluster_api.plan.autoscale.histogram import LatencyHistogram
from pdcluster_api.plan.autoscale.values import WorkerSample
from pdcluster_operator.scrape.page import MetricsPage, parse_page
from pdcluster_operator.scrape.windows import latencies_since, worker_sample
from pdcluster_schema.latency import LATENCY_BUCKETS
from tests.operator.pdcluster_operator.scrape.pages import page_of
from tests.worker_pages import WorkerPages

COUNTERS = (
    "prompt_tokens_total",
    "prefill_tokens_total",
    "prefill_seconds_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_count",
)
GAUGES = {
    "num_requests_running": 1.0,
    "num_requests_waiting": 2.0,
    "prefill_queue_requests": 3.0,
    "prefill_queue_tokens": 4.0,
    "kv_cache_usage_ratio": 0.5,
    "engine_busy_ratio": 0.6,
    "gpu_utilization_ratio": 0.7,
    "held_requests": 8.0,
}
UNKNOWN = WorkerSample("w", **GAUGES)


def reading(at: float, *, created: float | None = 1.0, **counters: float) -> MetricsPage:
    return replace(page_of(created=created, **GAUGES, **counters), at=at)


def test_sample_of_a_working_worker():
    worker = WorkerPages()
    worker.serve(requests=7, ttft_seconds=9.0)
    before = replace(parse_page(worker.text()), at=100.0)
    worker.serve(requests=10, ttft_seconds=0.25, itl_seconds=0.125)
    worker.set(num_requests_running=2)

    sample = worker_sample("w", replace(parse_page(worker.text()), at=105.0), before)

    assert sample == WorkerSample(
        "w",
        num_requests_running=2,
        num_requests_waiting=0,
        prefill_queue_requests=0,
        prefill_queue_tokens=0,
        kv_cache_usage_ratio=0,
        engine_busy_ratio=0,
        held_requests=0,
        request_rate=2.0,
        prompt_token_rate=200.0,
        prefill_token_rate=200.0,
        prefill_busy_rate=0.5,
    )


def test_latencies_are_those_since_the_page_before():
    worker = WorkerPages()
    worker.serve(requests=7, ttft_seconds=9.0)
    before = replace(parse_page(worker.text()), at=100.0)
    worker.serve(requests=10, ttft_seconds=0.25, itl_seconds=0.125)
    now = replace(parse_page(worker.text()), at=105.0)

    found = latencies_since(now, before)

    assert found["ttft"] == LatencyHistogram.of(LATENCY_BUCKETS, [(10, 0.25)])
    assert found["itl"] == LatencyHistogram.of(LATENCY_BUCKETS, [(90, 0.125)])
    assert found["queue"].count == 0
    assert latencies_since(now, None) == {}


def test_queue_is_on_the_page_from_its_first_request_on():
    some = LatencyHistogram.of(LATENCY_BUCKETS, [(2, 0.25)])
    now = replace(reading(10.0), histograms={"queue": some})

    assert latencies_since(now, reading(5.0)) == {"queue": some}


@pytest.mark.parametrize(
    "after",
    [
        {"at": 10.0, "prompt_tokens_created": 2.0},  # another life
        {"at": 10.0, "histograms": {"ttft": LatencyHistogram.of((0.1,), [(9, 0.05)])}},
        {"at": 10.0, "histograms": {"ttft": LatencyHistogram.of((0.1, 0.2), [(9, 0.15)])}},
    ],
)
def test_latencies_of_another_life_begin_again(after: dict[str, object]):
    """Also a bucket that counts fewer than before, and other buckets."""
    then = {"ttft": LatencyHistogram.of((0.1, 0.2), [(5, 0.05)])}
    before = replace(reading(5.0), histograms=then)

    assert latencies_since(replace(before, **after), before) == {}


def test_first_sample_has_no_rates():
    assert worker_sample("w", reading(5.0, prompt_tokens_total=50), None) == UNKNOWN


def test_idle_worker_has_rates_of_zero():
    sample = worker_sample(
        "w",
        reading(10.0, time_to_first_token_seconds_count=3),
        reading(5.0, time_to_first_token_seconds_count=3),
    )

    assert (sample.request_rate, sample.prompt_token_rate, sample.prefill_busy_rate) == (
        0.0,
        0.0,
        0.0,
    )


@pytest.mark.parametrize("name", COUNTERS)
def test_counter_that_went_back_is_another_life(name: str):
    """Also where the others went on: they are another life's too."""
    before = dict.fromkeys(COUNTERS, 10.0)
    after = {**dict.fromkeys(COUNTERS, 20.0), name: 9.0}

    assert worker_sample("w", reading(10.0, **after), reading(5.0, **before)) == UNKNOWN


@pytest.mark.parametrize(("before", "after"), [(1.0, 2.0), (2.0, 1.0), (None, 1.0), (1.0, None)])
def test_other_time_of_creation_is_another_life(before: float | None, after: float | None):
    """A worker that soon counted further than the one before it."""
    sample = worker_sample(
        "w",
        reading(10.0, created=after, prompt_tokens_total=50),
        reading(5.0, created=before, prompt_tokens_total=5),
    )

    assert sample == UNKNOWN


def test_worker_without_time_of_creation_has_rates():
    sample = worker_sample(
        "w",
        reading(10.0, created=None, prompt_tokens_total=15),
        reading(5.0, created=None, prompt_tokens_total=5),
    )

    assert sample.prompt_token_rate == 2.0


@pytest.mark.parametrize("at", [5.0, 4.0])
def test_no_time_between_two_readings_gives_no_rates(at: float):
    assert (
        worker_sample("w", reading(at, prompt_tokens_total=6), reading(5.0, prompt_tokens_total=5))
        == UNKNOWN
    )


def test_rate_after_missed_scrapes_is_over_the_whole_time():
    sample = worker_sample(
        "w", reading(25.0, prompt_tokens_total=40), reading(5.0, prompt_tokens_total=0)
    )

    assert sample.prompt_token_rate == 2.0
