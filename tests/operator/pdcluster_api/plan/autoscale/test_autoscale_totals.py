"""Totals of the windows: means over fresh rounds, and missing workers."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdcluster_api.plan.autoscale.totals import Totals, fresh_rounds, read_pool, together
from pdcluster_api.plan.autoscale.values import PoolFacts, PoolSample, WorkerSample
from tests.operator.pdcluster_api.plan.autoscale.worlds import IDLE, NOW


def worker(pod: str, **fields: float) -> WorkerSample:
    return replace(IDLE, pod=pod, **fields)


def facts(ready: int) -> PoolFacts:
    return PoolFacts("decode", "x", "H100", ready, ready, ready)


def read(*rounds: PoolSample, ready: int = 2) -> Totals:
    return read_fresh(facts(ready), rounds)


def read_fresh(pool: PoolFacts, rounds: Sequence[PoolSample], seconds: float = 15.0) -> Totals:
    return read_pool(pool, rounds, fresh_rounds(rounds, NOW, seconds))


def test_gauges_are_summed_over_workers_and_averaged_over_fresh_rounds():
    old = PoolSample(
        NOW - 20, (worker("a", num_requests_waiting=100), worker("b", num_requests_waiting=100))
    )
    then = PoolSample(
        NOW - 5, (worker("a", num_requests_waiting=1), worker("b", num_requests_waiting=2))
    )
    last = PoolSample(
        NOW, (worker("a", num_requests_waiting=3), worker("b", num_requests_waiting=4))
    )

    assert read(old, then, last).num_requests_waiting == 5.0


def test_a_gpu_counts_more_than_the_engine_and_the_busiest_is_a_mean_over_rounds():
    first = PoolSample(
        NOW - 5,
        (
            worker("a", engine_busy_ratio=1.0, gpu_utilization_ratio=0.2),
            worker("b", engine_busy_ratio=0.9),
        ),
    )
    last = PoolSample(
        NOW,
        (
            worker("a", engine_busy_ratio=1.0, gpu_utilization_ratio=0.4),
            worker("b", engine_busy_ratio=0.1),
        ),
    )

    totals = read(first, last)

    assert totals.has_gpu
    assert totals.utilization == pytest.approx(0.8)
    assert totals.peak_utilization == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 55.0, 1e300])
def test_a_worker_with_a_number_that_is_none_is_missing(bad: float):
    totals = read(
        PoolSample(
            NOW, (worker("a", kv_cache_usage_ratio=bad), worker("b", kv_cache_usage_ratio=0.5))
        )
    )

    assert (totals.reporting, totals.missing, totals.kv_cache_usage) == (1, 1, 0.5)


def test_stale_workers_are_missing_and_an_old_window_has_no_reporting_worker():
    assert read(PoolSample(NOW, (worker("a"),), stale=("b",))).missing == 1
    assert read(PoolSample(NOW - 16, (worker("a"), worker("b")))).missing == 2
    assert read().missing == 2


def test_a_ready_worker_that_has_never_answered_is_missing():
    totals = read(PoolSample(NOW, (worker("a"),)), ready=3)

    assert (totals.reporting, totals.missing) == (1, 2)


def test_rounds_of_a_clock_that_is_ahead_do_not_count():
    assert read(PoolSample(NOW + 100, (worker("a"), worker("b")))).missing == 2


def test_a_worker_is_settled_three_rounds_after_it_came():
    rounds = [PoolSample(NOW - 5.0 * back, (worker("a"), worker("b"))) for back in (3, 2, 1)]
    newest = PoolSample(NOW, (worker("a"), worker("b"), worker("c")))

    assert read(*rounds, newest, ready=3).settled == 2
    assert read(*rounds[1:], newest, ready=3).settled == 0  # the operator has just begun to look


def test_of_a_worker_that_drains_only_its_part_of_the_prefill_queue_counts():
    leaving = worker(
        "c",
        prefill_queue_requests=4,
        prefill_queue_tokens=400,
        num_requests_waiting=9,
        kv_cache_usage_ratio=1.0,
        engine_busy_ratio=1.0,
        request_rate=7.0,
    )
    rounds = [
        PoolSample(
            NOW - 5.0 * back,
            (worker("a", prefill_queue_requests=1), worker("b"), leaving),
            stale=("d",),
        )
        for back in (3, 2, 1, 0)
    ]
    pool = replace(facts(2), current=4, ending=2, leaving=frozenset({"c", "d"}))

    totals = read_fresh(pool, rounds)

    assert (totals.prefill_queue_requests, totals.prefill_queue_tokens) == (5.0, 400.0)
    assert (totals.reporting, totals.missing, totals.settled) == (2, 0, 2)
    assert (
        totals.num_requests_waiting,
        totals.kv_cache_usage,
        totals.utilization,
        totals.peak_kv_cache_usage,
        totals.peak_utilization,
    ) == (0.0, 0.0, 0.0, 0.0, 0.0)
    assert totals.request_rate is None


def test_a_queue_falls_by_what_the_same_workers_have_less_of():
    def at(back: int, *numbers: float, name: str = "abc") -> PoolSample:
        return PoolSample(
            NOW - 5.0 * back,
            tuple(
                worker(pod, num_requests_waiting=each, prefill_queue_requests=each)
                for pod, each in zip(name, numbers, strict=False)
            ),
        )

    falling = read(at(3, 100, 60), at(2, 90, 50), at(1, 80, 40), at(0, 70, 30))
    one_was_not_heard = read(at(3, 100, 60), at(2, 90, 50), at(1, 80, 40), at(0, 70))
    alone = read(at(0, 70, 30))

    assert (
        falling.prefill_queue_requests_change
        == falling.num_requests_waiting_change
        == pytest.approx(-4.0)
    )
    assert one_was_not_heard.prefill_queue_requests_change == pytest.approx(-2.0)
    assert alone.prefill_queue_requests_change == 0.0
    assert together([falling, alone]).num_requests_waiting_change == pytest.approx(-4.0)


def test_rates_that_are_not_known_stay_unknown():
    totals = read(
        PoolSample(
            NOW,
            (
                worker("a"),
                worker("b", prefill_token_rate=100.0, prefill_busy_rate=0.5, request_rate=math.nan),
            ),
        )
    )

    assert totals.prefill_speed == 200.0
    assert totals.request_rate is None


def test_pools_together_are_their_sums():
    one = read(
        PoolSample(
            NOW,
            (
                worker(
                    "a",
                    engine_busy_ratio=0.5,
                    prompt_token_rate=10.0,
                ),
            ),
        ),
        ready=1,
    )
    other = read(PoolSample(NOW, (worker("b", engine_busy_ratio=0.3),)), ready=1)

    whole = together([one, other, Totals(missing=1)])

    assert (whole.reporting, whole.missing, whole.peak_utilization) == (2, 1, 0.5)
    assert whole.utilization == pytest.approx(0.8)
    assert whole.prompt_token_rate == 10.0


def test_a_worker_that_is_gone_counts_no_more():
    """Else the role that it left would look busier than it is, and grow again."""
    both = (
        worker("a", kv_cache_usage_ratio=0.5, prefill_queue_requests=1.0),
        worker("b", kv_cache_usage_ratio=0.6, prefill_queue_requests=4.0),
    )
    window = [PoolSample(NOW - 10.0, both), PoolSample(NOW - 5.0, both), PoolSample(NOW, both[:1])]

    gone = read(*window, ready=1)
    drains = read_fresh(
        PoolFacts("prefill", "x", "H100", 1, 2, 1, ending=1, leaving=frozenset({"b"})), window, 20.0
    )

    assert (
        gone.reporting,
        gone.missing,
        gone.kv_cache_usage,
        gone.peak_kv_cache_usage,
        gone.prefill_queue_requests,
    ) == (
        1,
        0,
        pytest.approx(0.5),
        0.5,
        pytest.approx(1.0),
    )
    assert drains.prefill_queue_requests == pytest.approx(1.0 + 4.0 * 2 / 3)
