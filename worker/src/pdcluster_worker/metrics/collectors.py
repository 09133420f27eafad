"""Metrics that prometheus_client has not: a histogram of tokens, and use of the GPUs."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pdcluster_worker.system.nvidia import GpuUse


class TokenHistogram(Collector):
    """Cheap and without a lock, for per-token values in the event loop.

    buckets: upper bounds, ascending; +Inf is added.
    """

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


class GpuCollector(Collector):
    """Two metrics that have no sample while the driver says nothing: a scraper would not believe a
    page with a NaN, and 0 would be a GPU without work.
    """

    def __init__(self, name: str, registry: CollectorRegistry) -> None:
        self.device = ""
        self.use: Callable[[], GpuUse | None] = lambda: None
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        memory = GaugeMetricFamily(
            "pdcluster_device_memory_bytes",
            "memory of the worker's GPUs, by state: used by all of their processes, or total",
            labels=("device", "state"),
        )
        utilization = GaugeMetricFamily(
            "pdcluster_gpu_utilization_ratio",
            "share of the last moment with a kernel on the worker's GPUs, mean of them",
        )
        now = self.use()
        if now is not None:
            memory.add_metric((self.device, "used"), now.used)
            memory.add_metric((self.device, "total"), now.total)
            if now.busy is not None:
                utilization.add_metric((), now.busy)
        yield memory
        yield utilization
