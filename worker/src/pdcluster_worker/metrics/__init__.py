"""The worker's Prometheus metrics, on one page."""

from pdcluster_worker.metrics.table import Metrics

__all__ = ["Metrics"]
