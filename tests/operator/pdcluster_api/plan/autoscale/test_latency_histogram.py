"""Buckets of latencies: merged exactly, and percentiles as Prometheus has them."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_api.plan.autoscale.histogram import LatencyHistogram, is_ascending, merged

BOUNDS = (0.1, 0.2, 0.5, 1.0)
REQUESTS = st.lists(st.tuples(st.integers(0, 1000), st.floats(0.0, 2.0)), max_size=8)
HISTOGRAMS = st.builds(LatencyHistogram.of, st.just(BOUNDS), REQUESTS)


@pytest.mark.parametrize(
    ("percentile", "seconds"),
    [
        (50, 0.1),  # rank 50 is the last of the first bucket, from 0 to 0.1
        (25, 0.05),
        (90, 0.5),
        (70, 0.1 + 0.4 * 20 / 40),
        (95, 0.5),  # in the infinite bucket: its lower bound
        (99, 0.5),
    ],
)
def test_percentile_is_linear_within_its_bucket(percentile: int, seconds: float):
    """As histogram_quantile of the same buckets."""
    histogram = LatencyHistogram((0.1, 0.5, inf), (50.0, 90.0, 100.0))

    assert histogram.percentile(percentile) == pytest.approx(seconds)


def test_nothing_observed_has_neither_mean_nor_percentile():
    assert (LatencyHistogram().mean, LatencyHistogram().percentile(90)) == (None, None)
    assert merged([LatencyHistogram.of(BOUNDS, [])]).percentile(50) is None


def test_parts_without_a_bound_in_common_have_a_mean_and_no_percentile():
    parts = [LatencyHistogram((bound, inf), (2.0, 4.0), 2.0) for bound in (0.1, 0.5)]
    assert (merged(parts).mean, merged(parts).percentile(90)) == (0.5, None)


def test_the_least_that_a_float_can_count_has_a_percentile():
    least = 5e-324
    assert LatencyHistogram((0.1, 1.0, inf), (0.0, least, least)).percentile(50) > 0.1


@given(REQUESTS.filter(lambda requests: sum(number for number, _ in requests) > 0))
def test_percentile_lies_in_the_bucket_of_the_one_that_was_observed(
    requests: list[tuple[int, float]],
):
    every = sorted(seconds for number, seconds in requests for _ in range(number))
    histogram = LatencyHistogram.of(BOUNDS, [(float(number), each) for number, each in requests])

    before = 0.0
    for percentile in range(1, 100):
        true = every[-(-percentile * len(every) // 100) - 1]
        found = histogram.percentile(percentile)
        assert found is not None
        assert max((each for each in (0.0, *BOUNDS) if each < true), default=0.0) <= found + 1e-9
        assert found <= min((each for each in BOUNDS if each >= true), default=BOUNDS[-1]) + 1e-9
        assert found >= before
        before = found


@given(st.lists(HISTOGRAMS, max_size=4))
def test_merged_counts_what_all_counted(parts: list[LatencyHistogram]):
    whole = merged(parts)

    assert whole.count == sum(each.count for each in parts)
    assert whole.seconds == pytest.approx(sum(each.seconds for each in parts))
    assert is_ascending(whole.counts)


@given(HISTOGRAMS, HISTOGRAMS)
def test_what_is_added_is_what_came_since(before: LatencyHistogram, new: LatencyHistogram):
    after = LatencyHistogram(
        before.bounds,
        tuple(one + other for one, other in zip(before.counts, new.counts, strict=True)),
        before.seconds + new.seconds,
    )

    since = after.since(before)

    assert since is not None
    assert since.counts == new.counts
    assert since.seconds == pytest.approx(new.seconds)
    if new.count:
        assert before.since(after) is None  # a counter that went back


def test_other_buckets_say_nothing_of_what_came_since():
    assert LatencyHistogram.of((0.1, 0.2), []).since(LatencyHistogram.of((0.1,), [])) is None
