"""Latency objectives of a request: its own, else those of the policy."""

from dataclasses import dataclass

from msgspec.structs import replace

from pdcluster_schema.qos import SloSpec
from pdcluster_worker.messages.requests import RequestSpec

LEAST_SECONDS = 0.001  # of a time that has passed: a late request is still served


@dataclass(frozen=True, slots=True)
class LatencySlo:
    ttft_seconds: float
    tpot_seconds: float | None  # None = no objective


def slo_of(spec: RequestSpec, policy: SloSpec) -> LatencySlo:
    ttft, tpot = spec.ttft_slo_seconds, spec.tpot_slo_seconds
    if ttft is None:
        ttft = policy.ttft_milliseconds / 1000.0
    if tpot is None and policy.tpot_milliseconds is not None:
        tpot = policy.tpot_milliseconds / 1000.0
    return LatencySlo(ttft, tpot)


def aged(spec: RequestSpec, seconds: float) -> RequestSpec:
    """Subtract elapsed seconds: times count from arrival, also after a change of worker.

    >>> from pdcluster_worker.messages.requests import SamplingParams
    >>> spec = RequestSpec("r", [1], SamplingParams(1, 1), ttft_slo_seconds=0.5,
    ...     tpot_slo_seconds=0.1, deadline_seconds=20.0)
    >>> later = aged(spec, 5.0)
    >>> later.ttft_slo_seconds, later.tpot_slo_seconds, later.deadline_seconds
    (0.001, 0.1, 15.0)
    """
    ttft, deadline = spec.ttft_slo_seconds, spec.deadline_seconds
    if seconds <= 0 or (ttft is None and deadline is None):
        return spec
    return replace(
        spec, ttft_slo_seconds=_left(ttft, seconds), deadline_seconds=_left(deadline, seconds)
    )


def _left(whole: float | None, seconds: float) -> float | None:
    return None if whole is None else max(LEAST_SECONDS, whole - seconds)
