"""`spec.qos`: which requests are taken, how long they may wait, and what they get under load."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pdcluster_schema.rules import rule
from pdcluster_schema.section import SpecSection
from pdcluster_schema.values import Above0, Milliseconds, Natural, Positive, Text

MAX_TENANTS = 1000

Tier = Literal["high", "normal", "low"]


class AdmissionSpec(SpecSection):
    """Bounds of an ingress worker; beyond them a request is answered 503 (queue) or 413 (body).

    max_queued_requests: that wait for their first token
    max_queued_tokens:   of their prompts, in all; 0 = no bound
    max_body_bytes:      of a request's body
    worker_wait_seconds: a request waits at a router for so long while no decode worker takes new
                         work; 0 = is refused at once
    """

    max_queued_requests: Positive = 1024
    max_queued_tokens: Natural = 0
    max_body_bytes: Positive = 4 << 20
    worker_wait_seconds: Annotated[float, Field(ge=0.0, le=600.0)] = 0.0


class SloSpec(SpecSection):
    """Latency objectives of requests that give none.  tpot_milliseconds: None = none"""

    ttft_milliseconds: Milliseconds = 500.0
    tpot_milliseconds: Milliseconds | None = None


class EarlyRejectionSpec(SpecSection):
    """Fate of a request of low priority whose estimated TTFT or TPOT is over its SLO.

    enabled:                 estimate before any work
    reject_on_slo_violation: refuse it (429); otherwise it is taken, and degraded
    """

    enabled: bool = False
    reject_on_slo_violation: bool = True


class HighPrioritySpec(SpecSection):
    """offload_at_once: prompts go to a prefill worker whatever its queue and however idle the
    decode worker is.
    """

    offload_at_once: bool = False


class LowPrioritySpec(SpecSection):
    """Queues and workers for requests of low priority.

    threshold_milliseconds: of waiting for the first token beside other requests; None = any wait
    past_threshold:         Shed = a low request that waited longer is refused; Demote = a normal
                            one becomes low
    prefill_workers:        WhenCalm = only while no estimate is beyond degradation.atPressure
    """

    threshold_milliseconds: Milliseconds | None = None
    past_threshold: Literal["Shed", "Demote"] = "Shed"
    prefill_workers: Literal["Allowed", "WhenCalm", "Barred"] = "Allowed"


class SmallerModelSpec(SpecSection):
    """A model that is served elsewhere, named to those that are refused here.  url: of its API"""

    name: Text
    url: Text | None = None


class DegradationSpec(SpecSection):
    """Losses of requests of low priority under load, before they are refused.

    at_pressure:       the share of its SLO at which an estimate counts as load
    max_tokens:        most output tokens; None = as many as asked for
    max_prompt_tokens: longer prompts are refused; None = no limit but the model's
    """

    at_pressure: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    max_tokens: Positive | None = None
    max_prompt_tokens: Positive | None = None
    smaller_model: SmallerModelSpec | None = None


class EstimationSpec(SpecSection):
    """Estimate of the time until a request is complete, and the effect of deadlines.

    estimator:               ema = the averages of earlyRejection alone; rwt, loadAware:
                             docs/waiting-time.md
    allow_client_deadline:   the `pdcluster.deadline_ms` of a request counts; else it is refused
    reject_unmeetable:       refuse a request whose deadline is before its estimated completion
    slo_granularity_seconds: deadlines in one such step are one request group
    preset_token_milliseconds, preset_output_tokens: of an output token and of an answer, until they
                                                     were measured;
                             without the former nothing is estimated before
    """

    estimator: Literal["ema", "rwt", "loadAware"] = "ema"
    allow_client_deadline: bool = False
    reject_unmeetable: bool = False
    slo_granularity_seconds: Annotated[float, Field(gt=0.0, le=86400.0)] = 100.0
    preset_token_milliseconds: Milliseconds | None = None
    preset_output_tokens: Positive = 256

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reject_unmeetable and self.estimator == "ema":
            raise rule(
                "needs an estimate of the completion, and estimator ema has none",
                "set estimator to rwt or loadAware, or leave it out",
                at="rejectUnmeetable",
            )
        return self


class TenantSpec(SpecSection):
    """Limits of the requests with one API key; None = no limit.

    Each ingress worker lets through an even share.  Each choice of each prompt is a request.

    priority:                the highest that they may have, and what they have when they ask for
                             none
    requests_per_second:     on average; a second's may come at once, and one at least
    max_concurrent_requests: that have begun and not ended
    tokens_per_minute:       of prompts and answers, on average; a minute's may come at once
    """

    priority: Tier | None = None
    requests_per_second: Above0 | None = None
    max_concurrent_requests: Positive | None = None
    tokens_per_minute: Positive | None = None


class QosSpec(SpecSection):
    """Policy: which requests are accepted, and when a stalled engine is given up.

    Takes effect without a restart.
    stall_seconds:         time beyond its longest step for which an engine may have work and
                           make no step, or answer no ping; None = 20, and 120 where workers
                           compute on an accelerator, whose kernels may be compiled for a step
    allow_client_priority: the `priority` of a request counts, lower first; else any other
                           than 0 is refused
    tenants:               by the key of service.apiKeySecret; tenant_defaults: of all others
    """

    admission: AdmissionSpec = AdmissionSpec()
    slo: SloSpec = SloSpec()
    early_rejection: EarlyRejectionSpec = EarlyRejectionSpec()
    high_priority: HighPrioritySpec = HighPrioritySpec()
    low_priority: LowPrioritySpec = LowPrioritySpec()
    degradation: DegradationSpec = DegradationSpec()
    estimation: EstimationSpec = EstimationSpec()
    tenant_defaults: TenantSpec = TenantSpec()
    tenants: Annotated[dict[str, TenantSpec], Field(max_length=MAX_TENANTS)] = Field(
        default_factory=dict
    )
    stall_seconds: Annotated[int, Field(ge=1, le=3600)] | None = None
    allow_client_priority: bool = False
