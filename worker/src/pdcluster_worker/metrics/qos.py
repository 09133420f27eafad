"""Quality of service, by priority: high, normal or low."""

from itertools import product
from typing import get_args

from pdcluster_worker.config.qos import Tier
from pdcluster_worker.metrics.registering import Registering

QOS_REASONS = (
    *("slo_ttft", "slo_tpot", "prompt_limit", "prefill_barred", "waited_too_long", "displaced"),
    *("tenant_requests", "tenant_concurrency", "tenant_tokens"),
)
"""Reasons for which a worker refuses a request by its quality of service."""


class QosMetrics(Registering):
    """Decisions by priority, and the estimates that they rest on."""

    def __init__(self) -> None:
        super().__init__()
        self.qos_admitted = self._counter(
            "qos_admitted", "prompts that were taken, with all their choices", "priority"
        )
        self.qos_rejected = self._counter(
            "qos_rejected",
            "requests refused by a worker, before or while they waited",
            "reason",
            "priority",
        )
        self.qos_degraded = self._counter(
            "qos_degraded", "choices that were degraded under load, by reason", "reason", "priority"
        )
        self.qos_estimated_ttft_seconds = self._gauge(
            "qos_estimated_ttft_seconds", "wait for the first token of a request that comes now"
        )
        self.qos_estimated_tpot_seconds = self._gauge(
            "qos_estimated_tpot_seconds", "time per output token if one more stream joins"
        )
        self.qos_slo = self._counter(
            "qos_slo",
            "choices whose TTFT or TPOT met or missed its objective",
            "objective",
            "priority",
            "outcome",
        )
        self._begin_series()

    def _begin_series(self) -> None:
        """Begin every series: the rate of one that begins at 1 misses what made it 1."""
        for tier in get_args(Tier):
            self.qos_admitted.labels(tier)
            for reason in (*QOS_REASONS, "queue_full"):
                self.qos_rejected.labels(reason, tier)
            for objective, outcome in product(("ttft", "tpot"), ("met", "missed")):
                self.qos_slo.labels(objective, tier, outcome)
