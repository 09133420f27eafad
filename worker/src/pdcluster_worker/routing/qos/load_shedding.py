"""Load shedding: admit a request, degrade it, or refuse it.

An estimate degrades or refuses only low priority; an unknown one refuses nothing.
"""

from dataclasses import dataclass
from math import ceil

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import SmallerModelSpec, Tier
from pdcluster_worker.routing.qos.slo import LatencySlo

MAX_RETRY_SECONDS = 600  # present figures say little about later

TOO_MANY_REQUESTS = 429


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    turn_seconds: float | None = None  # until a stream ends, on average


@dataclass(frozen=True, slots=True)
class LoadRefusal:
    code: str  # for programs and metrics
    message: str
    retry_after_seconds: int


@dataclass(frozen=True, slots=True)
class Degradation:
    max_tokens: int | None = None  # None = unchanged
    is_local: bool = False  # no remote prefill


def retry_after(seconds: float | None) -> int:
    """Whole seconds for Retry-After, within 1 and MAX_RETRY_SECONDS."""
    return 1 if seconds is None else max(1, ceil(min(MAX_RETRY_SECONDS, seconds)))


def pressure(estimate: LoadEstimate, slo: LatencySlo) -> float:
    """Largest ratio of an estimate to its objective: over 1 it would be missed; 0 = unknown."""
    shares = [0.0]
    if estimate.ttft_seconds is not None:
        shares.append(estimate.ttft_seconds / slo.ttft_seconds)
    if estimate.tpot_seconds is not None and slo.tpot_seconds is not None:
        shares.append(estimate.tpot_seconds / slo.tpot_seconds)
    return max(shares)


def refusal(
    policy: PolicyConfig, tier: Tier, prompt_tokens: int, slo: LatencySlo, estimate: LoadEstimate
) -> LoadRefusal | None:
    """Refuse a low-priority request that would miss an objective or is too long."""
    if tier != "low":
        return None
    early, degradation = policy.early_rejection, policy.degradation
    elsewhere = _elsewhere(degradation.smaller_model)
    ttft, tpot = estimate.ttft_seconds, estimate.tpot_seconds
    if early.enabled and early.reject_on_slo_violation:
        if ttft is not None and ttft > slo.ttft_seconds:
            message = (
                f"low priority: the first token would take about {ttft:.1f} s, over the objective "
                f"of {slo.ttft_seconds:g} s"
            )
            return LoadRefusal(
                "slo_ttft",
                f"{message}: retry later{elsewhere}",
                retry_after(ttft - slo.ttft_seconds),
            )
        if tpot is not None and slo.tpot_seconds is not None and tpot > slo.tpot_seconds:
            message = (
                f"low priority: one more stream would make each token take about {tpot * 1000:.0f} "
                "ms"
            )
            bound = f", over the objective of {slo.tpot_seconds * 1000:g} ms"
            return LoadRefusal(
                "slo_tpot",
                f"{message}{bound}: retry later{elsewhere}",
                retry_after(estimate.turn_seconds),
            )
    limit = degradation.max_prompt_tokens
    if (
        limit is not None
        and prompt_tokens > limit
        and pressure(estimate, slo) >= degradation.at_pressure
    ):
        message = (
            f"low priority: {prompt_tokens} prompt tokens are over the {limit} that are taken "
            "under load"
        )
        return LoadRefusal(
            "prompt_limit",
            f"{message}: shorten the prompt or retry later{elsewhere}",
            retry_after(ttft),
        )
    return None


def degradation(policy: PolicyConfig, tier: Tier, load: float) -> Degradation:
    """load: the `pressure` of this request."""
    if tier != "low":
        return Degradation()
    is_loaded, workers = load >= policy.degradation.at_pressure, policy.low_priority.prefill_workers
    max_tokens = policy.degradation.max_tokens if is_loaded else None
    return Degradation(max_tokens, workers == "Barred" or (workers == "WhenCalm" and is_loaded))


def offloads_at_once(policy: PolicyConfig, tier: Tier, uncached_tokens: int) -> bool:
    """Return whether a prompt goes to a prefill worker whatever the load of both."""
    return (
        policy.high_priority.offload_at_once
        and tier == "high"
        and uncached_tokens >= max(1, policy.offload.min_offload_length)
    )


def _elsewhere(model: SmallerModelSpec | None) -> str:
    if model is None:
        return ""
    return f", or ask for the model {model.name}" + (f" at {model.url}" if model.url else "")
