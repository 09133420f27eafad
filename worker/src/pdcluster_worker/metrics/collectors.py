"""Metrics that prometheus_client has not, and metrics declared as attributes of a class."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pdcluster_schema.latency import LATENCY_BUCKETS
from pdcluster_worker.system.nvidia import GpuUse

CollectorT = TypeVar("CollectorT")


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
    """Two metrics without a sample while the driver says nothing: NaN and 0 would be wrong."""

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


class _Declared:
    def __init__(self, make: Callable[[str, CollectorRegistry], Any]) -> None:
        self.make = make


def declared(make: Callable[[str, CollectorRegistry], CollectorT]) -> CollectorT:
    """A collector of each instance, which `make` registers; typed as what an instance has."""
    return cast(CollectorT, _Declared(make))


def register_declared(metrics: object, registry: CollectorRegistry) -> None:
    """Give an instance its own collectors, in the order of their declaration."""
    for name, value in vars(type(metrics)).items():
        if isinstance(value, _Declared):
            setattr(metrics, name, value.make(f"pdcluster_{name}", registry))


def gauge(text: str, *labels: str) -> Gauge:
    return declared(lambda name, registry: Gauge(name, text, labels, registry=registry))


def histogram(text: str, *labels: str, buckets: Sequence[float] = LATENCY_BUCKETS) -> Histogram:
    return declared(
        lambda name, registry: Histogram(name, text, labels, registry=registry, buckets=buckets)
    )


def token_histogram(text: str) -> TokenHistogram:
    return declared(lambda name, registry: TokenHistogram(name, text, registry, LATENCY_BUCKETS))


def counter(text: str, *labels: str, first: Iterable[str | tuple[str, ...]] = ()) -> Counter:
    """A counter, whose page adds `_total` to its name.

    first: values of its labels that are there from the start: the rate of a series that begins at
           1 misses what made it 1.
    """

    def make(name: str, registry: CollectorRegistry) -> Counter:
        made = Counter(name, text, labels, registry=registry)
        for values in first:
            made.labels(*((values,) if isinstance(values, str) else values))
        return made

    return declared(make)
