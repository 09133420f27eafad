"""One registry of Prometheus metrics, and the forms in which the worker's are put into it.

A name gets the prefix `pdcluster_`; a counter's page adds the suffix `_total`.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Upper bounds of what counts requests."""

SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
"""Upper bounds of what takes time."""


class Registering:
    """One registry and everything that a group puts into it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def _histogram(
        self, name: str, text: str, *labels: str, buckets: Sequence[float] = SECONDS
    ) -> Histogram:
        return Histogram(f"pdcluster_{name}", text, labels, registry=self.registry, buckets=buckets)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"pdcluster_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str, first: Iterable[str] = ()) -> Counter:
        """Make a counter.

        first: values of its only label that are there from the start: the rate of a series that
               begins at 1 misses what made it 1
        """
        counter = Counter(f"pdcluster_{name}", text, labels, registry=self.registry)
        for value in first:
            counter.labels(value)
        return counter
