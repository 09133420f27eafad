"""Relayed requests of a router, and those that it serves itself."""

from pdcluster_worker.metrics.registering import Registering

_OUTCOMES = ("answered", "cut", "client_gone", "not_taken")
_RETRIES = ("connect", "stale", "lost", "draining", "not_http")
_OWN = ("route", "form", "key", "size", "slow", "crowd", "worker")


class RelayingMetrics(Registering):
    """Metrics of a router while `routing.relaying` is enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.relaying_requests = self._gauge(
            "relaying_requests", "requests that this router has relayed and that run"
        )
        self.relayed_requests = self._counter(
            "relayed_requests",
            "requests that this router relayed; cut: the worker broke off, not_taken: no worker "
            "took it and the router served it itself",
            "outcome",
            first=_OUTCOMES,
        )
        self.relay_retries = self._counter(
            "relay_retries",
            "times that a worker failed a request before its answer began",
            "reason",
            first=_RETRIES,
        )
        self.unrelayed_requests = self._counter(
            "unrelayed_requests",
            "requests that a relaying router served itself, by reason",
            "reason",
            first=_OWN,
        )
