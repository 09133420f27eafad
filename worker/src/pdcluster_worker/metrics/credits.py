"""Credits, which a remote prefill waits for: wants and grants at both sides."""

from pdcluster_worker.metrics.registering import REQUESTS, Registering


class CreditMetrics(Registering):
    """Requests that wait for a credit, and credits that are out."""

    def __init__(self) -> None:
        super().__init__()
        self.prefill_group_requests = self._histogram(
            "prefill_group_requests",
            "requests that were granted a credit together, at the prefill side",
            buckets=REQUESTS,
        )
        self.credit_wants = self._gauge(
            "credit_wants",
            "requests that wait for a credit here; each waits at every prefill worker that may "
            "take it",
        )
        self.credit_tokens = self._gauge(
            "credit_tokens", "tokens of credits that are out, and of work in hand"
        )
        self.credit_requests = self._counter(
            "credit_requests",
            "waits for a credit by outcome, at the decode side",
            "outcome",
            first=("granted", "no_prefill_worker", "cancelled"),
        )
        self.credit_wait_seconds = self._histogram(
            "credit_wait_seconds", "a remote prefill's wait for a credit and for blocks here"
        )
