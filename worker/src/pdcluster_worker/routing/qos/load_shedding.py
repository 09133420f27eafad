"""Admission of a request: its priority, objectives, bounds of the queue, and load shedding."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from msgspec.structs import replace

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import AdmissionSpec, SloSpec, SmallerModelSpec, Tier
from pdcluster_worker.messages.requests import RequestSpec

# lower first: below 0 is tier high, above 0 low; workers exchange only numbers
PRIORITIES: Mapping[str, int] = {"high": -100, "normal": 0, "low": 100}

TIERS: tuple[Tier, ...] = ("high", "normal", "low")


class PriorityError(ValueError):
    """The request may not have this priority; the message says what it may have."""


def tier_of(priority: int) -> Tier:
    """Below 0 is high, above 0 low.

    >>> [tier_of(priority) for priority in (-1000, -1, 0, 1, 1000)]
    ['high', 'high', 'normal', 'low', 'low']
    """
    return "high" if priority < 0 else "low" if priority > 0 else "normal"


def priority_of(requested: int | None, ceiling: Tier | None, *, client_decides: bool) -> int:
    """ceiling: the tenant's highest tier and default; None = no ceiling.  Raises PriorityError."""
    default = PRIORITIES[ceiling or "normal"]
    if requested is None or requested == default:
        return default
    if not client_decides:
        raise PriorityError(
            f"priority: {requested} is not allowed here: leave it out, or set "
            "qos.allowClientPriority of the PDCluster"
        )
    if ceiling is not None and TIERS.index(tier_of(requested)) < TIERS.index(ceiling):
        raise PriorityError(
            f"priority: {requested} is {tier_of(requested)}, and the highest of this API key is "
            f"{ceiling}: leave it out or ask for a lower one"
        )
    return requested


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

    def left(whole: float | None) -> float | None:
        return None if whole is None else max(LEAST_SECONDS, whole - seconds)

    return replace(spec, ttft_slo_seconds=left(ttft), deadline_seconds=left(deadline))


def full(policy: AdmissionSpec, num_queued: int, queued_tokens: int, num_tokens: int) -> str | None:
    """Reason for a refusal, or None.  With an empty queue a request of any size is admitted."""
    if num_queued >= policy.max_queued_requests:
        return (
            f"{num_queued} requests wait for their first token (qos.admission.maxQueuedRequests is "
            f"{policy.max_queued_requests}): retry later"
        )
    if (
        policy.max_queued_tokens
        and num_queued
        and queued_tokens + num_tokens > policy.max_queued_tokens
    ):
        return (
            f"{queued_tokens} prompt tokens wait here, and {num_tokens} more are over "
            "qos.admission.maxQueuedTokens "
            f"({policy.max_queued_tokens}): retry later"
        )
    return None


def seconds_until_capacity(
    policy: AdmissionSpec,
    num_queued: int,
    num_tokens: int,
    firsts_per_second: float,
    token_seconds: float | None,
) -> float | None:
    """token_seconds: of waiting for each prompt token ahead.  None = unknown."""
    seconds = []
    excess_requests = num_queued + 1 - policy.max_queued_requests
    if excess_requests > 0 and firsts_per_second > 0:
        seconds.append(excess_requests / firsts_per_second)
    excess_tokens = num_tokens - policy.max_queued_tokens
    if policy.max_queued_tokens and excess_tokens > 0 and token_seconds is not None:
        seconds.append(excess_tokens * token_seconds)
    return max(seconds, default=None)


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
    """Refuse a low-priority request that would miss an objective or is too long.

    An unknown estimate refuses nothing.
    """
    if tier != "low":
        return None
    early, degradation = policy.early_rejection, policy.degradation
    elsewhere = _elsewhere(degradation.smaller_model)
    ttft, tpot = estimate.ttft_seconds, estimate.tpot_seconds
    if early.enabled and early.reject_on_slo_violation:
        if ttft is not None and ttft > slo.ttft_seconds:
            message = (
                f"low priority: the first token would take about {ttft:.1f} s, over the objective "
                f"of {slo.ttft_seconds:g} s: retry later{elsewhere}"
            )
            return LoadRefusal("slo_ttft", message, retry_after(ttft - slo.ttft_seconds))
        if tpot is not None and slo.tpot_seconds is not None and tpot > slo.tpot_seconds:
            message = (
                f"low priority: one more stream would make each token take about {tpot * 1000:.0f} "
                f"ms, over the objective of {slo.tpot_seconds * 1000:g} ms: retry later{elsewhere}"
            )
            return LoadRefusal("slo_tpot", message, retry_after(estimate.turn_seconds))
    limit = degradation.max_prompt_tokens
    if (
        limit is not None
        and prompt_tokens > limit
        and pressure(estimate, slo) >= degradation.at_pressure
    ):
        message = (
            f"low priority: {prompt_tokens} prompt tokens are over the {limit} that are taken "
            f"under load: shorten the prompt or retry later{elsewhere}"
        )
        return LoadRefusal("prompt_limit", message, retry_after(ttft))
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
