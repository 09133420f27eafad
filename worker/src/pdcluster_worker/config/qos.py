"""QoS policy: admission, latency objectives, degradation and tenants."""

from typing import Annotated, Literal

import msgspec

from pdcluster_worker.config.section import PolicySection, Positive, Share

Milliseconds = Annotated[float, msgspec.Meta(gt=0.0)]
Rate = Annotated[float, msgspec.Meta(gt=0.0)]
Tier = Literal["high", "normal", "low"]  # high below 0, normal at 0, low above


class SloPolicy(PolicySection, frozen=True):
    """Objectives of requests that give none; tpot_milliseconds: None = none."""

    ttft_milliseconds: Milliseconds = 500.0
    tpot_milliseconds: Milliseconds | None = None


class EarlyRejectionPolicy(PolicySection, frozen=True):
    """Low-priority requests whose estimated TTFT or TPOT exceeds its objective."""

    enabled: bool = False  # estimate before any work
    reject_on_slo_violation: bool = True  # else admit and degrade


class HighPriorityPolicy(PolicySection, frozen=True):
    """offload_at_once: prefill remotely whatever the load of both workers."""

    offload_at_once: bool = False


class LowPriorityPolicy(PolicySection, frozen=True):
    threshold_milliseconds: Milliseconds | None = None  # of waiting; None = unlimited
    # Demote = a normal request becomes low
    past_threshold: Literal["Shed", "Demote"] = "Shed"
    # WhenCalm = below at_pressure
    prefill_workers: Literal["Allowed", "WhenCalm", "Barred"] = "Allowed"


class SmallerModelPolicy(PolicySection, frozen=True):
    """A model served elsewhere that refusals name; url: None = only its name."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    url: Annotated[str, msgspec.Meta(min_length=1)] | None = None


class DegradationPolicy(PolicySection, frozen=True):
    """Limits of low-priority requests under load."""

    at_pressure: Share = 0.8  # estimate over objective
    max_tokens: Positive | None = None  # output; None = unchanged
    max_prompt_tokens: Positive | None = None  # longer prompts are refused
    smaller_model: SmallerModelPolicy | None = None


class EstimationPolicy(PolicySection, frozen=True):
    """Estimates of completion times, and clients' deadlines."""

    # ema = moving averages; others: `routing.waiting_time`
    estimator: Literal["ema", "rwt", "loadAware"] = "ema"
    allow_client_deadline: bool = False  # else a deadline is refused
    reject_unmeetable: bool = False
    # of a request group
    slo_granularity_seconds: Annotated[float, msgspec.Meta(gt=0.0, le=86400.0)] = 100.0
    # None = no estimate before it is measured
    preset_token_milliseconds: Milliseconds | None = None
    preset_output_tokens: Positive = 256

    def __post_init__(self) -> None:
        if self.reject_unmeetable and self.estimator == "ema":
            raise ValueError(
                "rejectUnmeetable needs an estimate of the completion: set estimator to rwt or "
                "loadAware, or leave it out"
            )


class TenantPolicy(PolicySection, frozen=True):
    """Limits of one API key; None = no limit.  Each ingress enforces an even share."""

    priority: Tier | None = None  # the highest, and the default
    requests_per_second: Rate | None = None  # each choice of each prompt is one
    max_concurrent_requests: Positive | None = None
    tokens_per_minute: Positive | None = None  # prompts and answers
