"""The worker's Prometheus metrics, on one page."""

from pdcluster_worker.metrics.table import Metrics
from pdcluster_worker.metrics.vllm_names import vllm_names

__all__ = ["Metrics", "vllm_names"]
