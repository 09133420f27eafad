"""A cheap Prometheus histogram for per-token values, without a lock: for the event loop only."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class TokenHistogram(Collector):
    """Without labels.  buckets: upper bounds, ascending; +Inf is added."""

    def __init__(
        self, name: str, text: str, registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        self._name = name
        self._text = text
        self._bounds = [*buckets, inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = map(floatToGoString, self._bounds)
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
