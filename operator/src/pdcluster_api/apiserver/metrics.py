"""Metrics of the requests to the API server; the process's registry is handed in."""

from prometheus_client import CollectorRegistry, Counter, Histogram


class ApiMetrics:
    """Counts each try of a request, and every error that reached a caller."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Counter(
            "pdcluster_operator_api_calls",
            "Requests to the API server by HTTP status (0 = no answer), each try counted.",
            ["verb", "kind", "code"],
            registry=registry,
        )
        self.errors = Counter(
            "pdcluster_operator_api_errors",
            "Requests to the API server that failed for good, after all tries, by error.",
            ["verb", "kind", "error"],
            registry=registry,
        )
        self.seconds = Histogram(
            "pdcluster_operator_api_call_seconds",
            "Seconds of a request to the API server, each try for itself.",
            ["verb"],
            registry=registry,
        )
