"""The histogram of what is observed with each token beside prometheus_client's own."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from pdcluster_worker.metrics.collectors import TokenHistogram

BOUNDS = (0.001, 0.5, 1.0, 2.5)
VALUES = st.one_of(st.sampled_from([0.0, *BOUNDS, 3.0]), st.floats(0.0, 10.0))


@given(st.lists(VALUES, max_size=20))
def test_its_page_is_prometheus_clients(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histograms = (
        TokenHistogram("x", "text", ours, BOUNDS),
        Histogram("x", "text", registry=theirs, buckets=BOUNDS),
    )
    for value in values:
        for histogram in histograms:
            histogram.observe(value)
    lines = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]

    assert generate_latest(ours).splitlines() == lines
