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
    """Low-priority requests whose estimated TTFT or TPOT exceeds its objective.

    enabled:                 estimate before any work.
    reject_on_slo_violation: refuse; else admit and degrade.
    """

    enabled: bool = False
    reject_on_slo_violation: bool = True


class HighPriorityPolicy(PolicySection, frozen=True):
    """offload_at_once: prefill remotely whatever the load of both workers."""

    offload_at_once: bool = False


class LowPriorityPolicy(PolicySection, frozen=True):
    """threshold_milliseconds: wait for the first token while others run; None = unlimited.
    past_threshold:         Shed = refuse a low request; Demote = a normal one becomes low.
    prefill_workers:        WhenCalm = while no estimate exceeds `degradation.at_pressure`.
    """

    threshold_milliseconds: Milliseconds | None = None
    past_threshold: Literal["Shed", "Demote"] = "Shed"
    prefill_workers: Literal["Allowed", "WhenCalm", "Barred"] = "Allowed"


class SmallerModelPolicy(PolicySection, frozen=True):
    """A model served elsewhere that refusals name; url: None = only its name."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    url: Annotated[str, msgspec.Meta(min_length=1)] | None = None


class DegradationPolicy(PolicySection, frozen=True):
    """Limits of low-priority requests under load.

    at_pressure:       estimate over objective from which it counts as load.
    max_tokens:        output tokens; None = unchanged.
    max_prompt_tokens: longer prompts are refused; None = no limit.
    """

    at_pressure: Share = 0.8
    max_tokens: Positive | None = None
    max_prompt_tokens: Positive | None = None
    smaller_model: SmallerModelPolicy | None = None


class EstimationPolicy(PolicySection, frozen=True):
    """Estimates of completion times, and clients' deadlines.

    estimator:               ema = averages of `early_rejection`; others in `routing.waiting_time`.
    allow_client_deadline:   else a request with `pdcluster.deadline_ms` is refused.
    reject_unmeetable:       refuse a request that cannot meet its deadline.
    slo_granularity_seconds: step of deadlines that make one request group.
    preset_token_milliseconds, preset_output_tokens: until measured; without the former no estimate.
    """

    estimator: Literal["ema", "rwt", "loadAware"] = "ema"
    allow_client_deadline: bool = False
    reject_unmeetable: bool = False
    slo_granularity_seconds: Annotated[float, msgspec.Meta(gt=0.0, le=86400.0)] = 100.0
    preset_token_milliseconds: Milliseconds | None = None
    preset_output_tokens: Positive = 256

    def __post_init__(self) -> None:
        if self.reject_unmeetable and self.estimator == "ema":
            raise ValueError(
                "rejectUnmeetable needs an estimate of the completion: set estimator to rwt or "
                "loadAware, or leave it out"
            )


class TenantPolicy(PolicySection, frozen=True):
    """Limits of one API key; None = no limit.  Each ingress enforces an even share.

    priority:            highest, and the default.
    requests_per_second: each choice of each prompt is one; bursts of a second's worth are allowed.
    tokens_per_minute:   prompts and answers; bursts of a minute's worth are allowed.
    """

    priority: Tier | None = None
    requests_per_second: Rate | None = None
    max_concurrent_requests: Positive | None = None
    tokens_per_minute: Positive | None = None
