"""Quality of service, as the policy file has it: which requests are taken, how long they may wait,
and what they get.
"""

from typing import Annotated, Literal

import msgspec

from pdcluster_worker.config.section import PolicySection, Positive, Share

Milliseconds = Annotated[float, msgspec.Meta(gt=0.0)]
Rate = Annotated[float, msgspec.Meta(gt=0.0)]
Tier = Literal["high", "normal", "low"]
"""Tier of a priority: high below 0, normal at 0, low above."""


class SloPolicy(PolicySection, frozen=True):
    """The latency objectives of requests that give none; tpot_milliseconds: None = none."""

    ttft_milliseconds: Milliseconds = 500.0
    tpot_milliseconds: Milliseconds | None = None


class EarlyRejectionPolicy(PolicySection, frozen=True):
    """Treatment of requests of low priority whose estimated TTFT or TPOT is over its SLO.

    enabled:                 estimate before any work; without it every request is taken that finds
                             room in the queue.
    reject_on_slo_violation: refuse it; otherwise it is taken, and degraded.
    """

    enabled: bool = False
    reject_on_slo_violation: bool = True


class HighPriorityPolicy(PolicySection, frozen=True):
    """offload_at_once: prompts go to a prefill worker whatever its queue and however idle this
    worker is.
    """

    offload_at_once: bool = False


class LowPriorityPolicy(PolicySection, frozen=True):
    """Waits and workers for requests of low priority.

    threshold_milliseconds: of waiting for the first token beside other requests; None = any wait.
    past_threshold:         Shed = a low request that waited longer is refused; Demote = a normal
                            one becomes low.
    prefill_workers:        WhenCalm = only while no estimate is beyond `degradation.at_pressure`.
    """

    threshold_milliseconds: Milliseconds | None = None
    past_threshold: Literal["Shed", "Demote"] = "Shed"
    prefill_workers: Literal["Allowed", "WhenCalm", "Barred"] = "Allowed"


class SmallerModelPolicy(PolicySection, frozen=True):
    """A model that is served elsewhere, for those that are refused here.  url: None = the refusal
    gives its name alone.
    """

    name: Annotated[str, msgspec.Meta(min_length=1)]
    url: Annotated[str, msgspec.Meta(min_length=1)] | None = None


class DegradationPolicy(PolicySection, frozen=True):
    """Limits of requests of low priority under load, before they are refused.

    at_pressure:       the share of its SLO at which an estimate counts as load.
    max_tokens:        most output tokens; None = as many as asked for.
    max_prompt_tokens: longer prompts are refused; None = no limit but the model's.
    smaller_model:     what a refusal names.
    """

    at_pressure: Share = 0.8
    max_tokens: Positive | None = None
    max_prompt_tokens: Positive | None = None
    smaller_model: SmallerModelPolicy | None = None


class EstimationPolicy(PolicySection, frozen=True):
    """Estimates of the time until a request is complete, and the effect of clients' deadlines.

    estimator:               ema = the averages of `early_rejection` alone; rwt, loadAware: see
                             `routing.waiting_time`.
    allow_client_deadline:   whether `pdcluster.deadline_ms` of a request counts; it is refused
                             where it does not.
    reject_unmeetable:       refuse a request whose deadline is before its estimated completion.
    slo_granularity_seconds: deadlines in one such step are one request group.
    preset_token_milliseconds, preset_output_tokens: of an output token and of an answer, until they
                                                     were measured; without the
                             former nothing is estimated before.
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
    """Limits of the requests with one API key; None = no limit.

    Each ingress worker lets through an even share (`routing.qos.tenants`).  Each choice of each
    prompt is a request.

    priority:                the highest that they may have, and what they have when they ask for
                             none.
    requests_per_second:     on average; as many may come at once as in one second, and one at
                             least.
    max_concurrent_requests: that have begun and not ended.
    tokens_per_minute:       of prompts and answers, on average; a minute's may come at once.
    """

    priority: Tier | None = None
    requests_per_second: Rate | None = None
    max_concurrent_requests: Positive | None = None
    tokens_per_minute: Positive | None = None
