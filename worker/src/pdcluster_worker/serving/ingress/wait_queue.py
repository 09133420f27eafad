"""Requests that wait at an ingress before they run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pdcluster_worker.errors import RequestError
from pdcluster_worker.routing.qos.load_shedding import full, retry_after
from pdcluster_worker.serving.worker_context import WorkerContext


@dataclass(slots=True)
class WaitQueue:
    """Requests that wait before they run, within the bounds of the policy's admission."""

    num_requests: int = 0
    num_tokens: int = 0

    @contextmanager
    def join(
        self, worker: WorkerContext, num_tokens: int, retry_seconds: float | None
    ) -> Iterator[None]:
        """Raises RequestError 503 when it is full.  retry_seconds: None = unknown."""
        if reason := full(worker.policy.admission, self.num_requests, self.num_tokens, num_tokens):
            retry = retry_after(retry_seconds)
            raise RequestError(reason, status=503, code="queue_full", retry_after_seconds=retry)
        self.num_requests += 1
        self.num_tokens += num_tokens
        try:
            with worker.request():
                yield
        finally:
            self.num_requests -= 1
            self.num_tokens -= num_tokens
