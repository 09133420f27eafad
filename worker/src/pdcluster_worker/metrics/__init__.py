"""The worker's Prometheus metrics, on one page."""

from pdcluster_worker.metrics.collectors import vllm_names
from pdcluster_worker.metrics.table import Metrics

__all__ = ["Metrics", "vllm_names"]
