"""Requests of a worker: how many there are, and how each was answered."""

from typing import get_args

from pdcluster_worker.messages.requests import FinishReason
from pdcluster_worker.metrics.qos import QOS_REASONS
from pdcluster_worker.metrics.registering import Registering

_REJECTIONS = (
    *("queue_full", "bodies_full", "connections_full", "body_timeout"),
    *("draining", "not_ready", "no_prefill_worker", "no_decode_worker", "deadline_unmeetable"),
    *QOS_REASONS,
    *("invalid_request", "invalid_api_key", "model_not_found", "context_length_exceeded"),
    "body_too_large",
)


class RequestMetrics(Registering):
    """Requests and tokens that were counted."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests_running = self._gauge(
            "num_requests_running",
            "requests in the engine's running set; each of n choices is one",
        )
        self.num_requests_waiting = self._gauge(
            "num_requests_waiting",
            "requests that wait for this worker's engine; each of n choices is one",
        )
        self.request_success = self._counter(
            "request_success",
            "choices that completed, n of a request, at the worker that its client asked",
            "finish_reason",
            first=get_args(FinishReason),
        )
        self.request_rejected = self._counter(
            "request_rejected", "requests refused before any work", "reason", first=_REJECTIONS
        )
        self.request_moves = self._counter(
            "request_moves",
            "started choices that left their worker, by reason and outcome",
            "reason",
            "outcome",
        )
        self.draining = self._gauge(
            "draining",
            "requests, transfers and then clients that a draining worker still waits for; "
            "0 when it does not drain",
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens",
            "prompt tokens of requests that the engine admitted: once for each of n choices, and "
            "of a remote prefill at the decode worker",
        )
        self.prefill_tokens = self._counter(
            "prefill_tokens", "prompt tokens computed here, without those that a cache had"
        )
        self.generation_tokens = self._counter("generation_tokens", "tokens sampled here")
