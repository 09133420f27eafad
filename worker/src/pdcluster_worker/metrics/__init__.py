"""The worker's Prometheus metrics, on one page."""

from pdcluster_worker.metrics.page import Metrics

__all__ = ["Metrics"]
