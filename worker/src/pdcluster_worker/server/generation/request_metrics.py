"""Latency metrics of one choice: TTFT = first token - arrival; TPOT = (last - first) / (tokens -
1), undefined for one token; ITL = each gap.
"""

from pdcluster_worker.config.qos import Tier
from pdcluster_worker.messages.requests import FinishReason, Token
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.routing.qos.slo import LatencySlo


class ChoiceTimer:
    def __init__(
        self, metrics: Metrics, arrival_seconds: float, tier: Tier, slo: LatencySlo
    ) -> None:
        self._metrics = metrics
        self._tier = tier
        self._slo = slo
        self._arrival = arrival_seconds
        self._first = 0.0
        self._last = 0.0
        self._num_tokens = 0

    def token(self, token: Token, now: float) -> None:
        if self._num_tokens == 0:
            self._first = now
            self._metrics.time_to_first_token_seconds.observe(now - self._arrival)
            self._count("ttft", now - self._arrival, self._slo.ttft_seconds)
            self._observe_phases(token)
        else:
            self._metrics.inter_token_latency_seconds.observe(now - self._last)
        self._last = now
        self._num_tokens += 1

    def finished(self, reason: FinishReason) -> None:
        self._metrics.e2e_request_latency_seconds.observe(self._last - self._arrival)
        self._metrics.request_success.labels(reason).inc()
        if self._num_tokens > 1:
            tpot = (self._last - self._first) / (self._num_tokens - 1)
            self._metrics.time_per_output_token_seconds.observe(tpot)
            if self._slo.tpot_seconds is not None:
                self._count("tpot", tpot, self._slo.tpot_seconds)

    def _count(self, objective: str, seconds: float, bound: float) -> None:
        outcome = "met" if seconds <= bound else "missed"
        self._metrics.qos_slo.labels(objective, self._tier, outcome).inc()

    def _observe_phases(self, token: Token) -> None:
        for phase, seconds in (("queue", token.queue_seconds), ("prefill", token.prefill_seconds)):
            if seconds is not None:
                self._metrics.ttft_phase_seconds.labels(phase).observe(seconds)
