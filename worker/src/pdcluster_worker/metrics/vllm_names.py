"""Gauges under vLLM's names, by which an endpoint picker of the Gateway API chooses a worker."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdcluster_worker.metrics.table import Metrics


def vllm_names(metrics: Metrics) -> CollectorRegistry:
    """Registry of the gauges under vLLM's names, read from ours, so they never differ."""
    registry = CollectorRegistry()
    registry.register(_VllmNames(metrics))
    return registry


class _VllmNames(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        metrics = self._metrics
        for name, gauge in (
            ("num_requests_running", metrics.num_requests_running),
            ("num_requests_waiting", metrics.num_requests_waiting),
            ("kv_cache_usage_perc", metrics.kv_cache_usage_ratio),
        ):
            yield GaugeMetricFamily(f"vllm:{name}", _text(gauge), value=_sum(gauge))
        sizes = GaugeMetricFamily(
            "vllm:cache_config_info",
            "always 1; its labels are the tokens of a KV block and the number of blocks",
            labels=("block_size", "num_gpu_blocks"),
        )
        sizes.add_metric((str(metrics.block_size()), str(round(_sum(metrics.kv_blocks)))), 1)
        yield sizes


def _sum(gauge: Gauge) -> float:
    return sum(sample.value for family in gauge.collect() for sample in family.samples)


def _text(gauge: Gauge) -> str:
    return next(iter(gauge.collect())).documentation
