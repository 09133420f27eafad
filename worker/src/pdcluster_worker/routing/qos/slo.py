"""The latency objectives of a request: its own, else those of the policy."""

from dataclasses import dataclass

from pdcluster_worker.engine.messages import RequestSpec
from pdcluster_worker.qos_config import SloPolicy


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds of a request's latency, in seconds; tpot_seconds: None = none."""

    ttft_seconds: float
    tpot_seconds: float | None


def slo_of(spec: RequestSpec, policy: SloPolicy) -> Slo:
    """What holds for a request: each objective that it gave, and the policy's for the others."""
    ttft, tpot = spec.ttft_slo_seconds, spec.tpot_slo_seconds
    if ttft is None:
        ttft = policy.ttft_milliseconds / 1000.0
    if tpot is None and policy.tpot_milliseconds is not None:
        tpot = policy.tpot_milliseconds / 1000.0
    return Slo(ttft, tpot)
