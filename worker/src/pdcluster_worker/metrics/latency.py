"""Latencies as clients see them, and the error of what was estimated of them."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from pdcluster_worker.metrics.registering import SECONDS, Registering

_ERRORS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)


class LatencyMetrics(Registering):
    """Latencies of requests, and of the tokens of one."""

    def __init__(self) -> None:
        super().__init__()
        self.time_to_first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "arrival to first token, at the ingress"
        )
        self.ttft_phase_seconds = self._histogram(
            "ttft_phase_seconds", "parts of the time to first token", "phase"
        )
        self.time_per_output_token_seconds = self._histogram(
            "time_per_output_token_seconds",
            "per request: (end - first token) / (output tokens - 1)",
        )
        self.inter_token_latency_seconds = TokenHistogram(
            "pdcluster_inter_token_latency_seconds",
            "each gap between two tokens",
            self.registry,
            SECONDS,
        )
        self.e2e_request_latency_seconds = self._histogram(
            "e2e_request_latency_seconds", "arrival of the request to its last token"
        )
        self.estimate_error_ratio = self._histogram(
            "estimate_error_ratio",
            "relative error of an estimate made at arrival; its mean is the MAPE",
            "quantity",
            "group",
            buckets=_ERRORS,
        )


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
