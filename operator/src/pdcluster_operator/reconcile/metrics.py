"""Metrics of the loop, in the process's own registry, beside those of the API calls."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class LoopMetrics:
    """The queue, the work on one PDCluster, leadership, and how many PDClusters are ready."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.queue_depth = Gauge("pdcluster_operator_queue_depth", "PDClusters that wait for a worker.", registry=registry)
        self.reconcile_seconds = Histogram(
            "pdcluster_operator_reconcile_seconds",
            "Seconds to observe, plan and converge one PDCluster.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self.reconcile_errors = Counter(
            "pdcluster_operator_reconcile_errors", "Reconciles that ended with an exception.", registry=registry
        )
        self.is_leader = Gauge("pdcluster_operator_is_leader", "1 while this replica leads.", registry=registry)
        self.pdclusters = Gauge(
            "pdcluster_operator_pdclusters", "PDClusters by status of their Ready condition.", ["ready"], registry=registry
        )
        for value in ("True", "False", "Unknown"):
            self.pdclusters.labels(value)
