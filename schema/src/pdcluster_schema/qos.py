"""`spec.qos`: which requests are taken, how long they may wait, and what they get under load."""

from typing import Annotated, Literal

from pydantic import Field

from pdcluster_schema.section import Rule, SpecSection
from pdcluster_schema.values import Above0, Milliseconds, Natural, Positive, Text

MAX_TENANTS = 1000

Tier = Literal["high", "normal", "low"]


class AdmissionSpec(SpecSection):
    """Bounds of one ingress worker."""

    max_queued_requests: Positive = 1024
    """Requests that wait; beyond it 503. One request has at most as many generations (prompts times
    n).
    """
    max_queued_tokens: Natural = 0
    """Prompt tokens of all requests that wait for their first token; beyond it 503. A request that
    finds none waiting is taken whatever its size. About the time to first token that is still good,
    times the prompt tokens that a worker computes in a second. 0 = no bound.
    """
    max_body_bytes: Positive = 4 << 20
    """Bytes of a request's body; beyond it 413."""
    worker_wait_seconds: Annotated[float, Field(ge=0.0, le=600.0)] = 0.0
    """While no decode worker takes new work a request waits at a router for so long at most, and is
    then refused with 503 and the reason. 0 = is refused at once.
    """


class SloSpec(SpecSection):
    """Latency objectives of requests that give none in their field pdcluster; met and missed ones
    are counted in pdcluster_qos_slo_total.
    """

    ttft_milliseconds: Milliseconds = 500.0
    """Time to first token."""
    tpot_milliseconds: Milliseconds | None = None
    """Time per output token; by default there is no objective."""


class EarlyRejectionSpec(SpecSection):
    """Refusal or degradation of a request of low priority whose estimated TTFT or TPOT is over its
    SLO. Others are never refused so.
    """

    enabled: bool = False
    """Estimate before any work; without it every request is taken that finds room in the queue."""
    reject_on_slo_violation: bool = True
    """Refuse it, with 429 and a Retry-After; otherwise it is taken, and degraded as qos.degradation
    says.
    """


class HighPrioritySpec(SpecSection):
    """Treatment of requests of high priority (below 0)."""

    offload_at_once: bool = False
    """Their prompts of at least routing.offload.minOffloadLength uncached tokens go to a prefill
    worker whatever waits there, and however idle the decode worker is.
    """


class LowPrioritySpec(SpecSection):
    """Waits and workers of requests of low priority (above 0)."""

    threshold_milliseconds: Milliseconds | None = None
    """Time that a request may wait for its first token while others wait too; by default any."""
    past_threshold: Literal["Shed", "Demote"] = "Shed"
    """Effect of a longer wait. Shed = one of low priority is refused with 429; Demote = one of
    normal priority becomes one of low priority.
    """
    prefill_workers: Literal["Allowed", "WhenCalm", "Barred"] = "Allowed"
    """Use of prefill workers for their prompts; WhenCalm = only while no estimate is beyond
    degradation.atPressure of its SLO.
    """


class SmallerModelSpec(SpecSection):
    """A model for requests that would be refused. One of service.models answers them, unless they
    forbid it (their field pdcluster.smaller_model); any other one is named in the refusal.
    """

    name: Text
    """Name by which clients call it."""
    url: Text | None = None
    """Address of its API, of one that is not in service.models; by default the refusal gives the
    name alone.
    """


class DegradationSpec(SpecSection):
    """Losses of requests of low priority under load, before they are refused; the answer names it
    in its field pdcluster and the header x-pdcluster-degraded.
    """

    at_pressure: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """The share of its SLO at which an estimate counts as load."""
    max_tokens: Positive | None = None
    """Most output tokens; by default as many as asked for."""
    max_prompt_tokens: Positive | None = None
    """A longer prompt is refused with 429; by default there is no limit but the model's."""
    smaller_model: SmallerModelSpec | None = None


class EstimationSpec(SpecSection):
    """Estimates of the time until a request is complete, and the effect of clients' deadlines
    (their field pdcluster.deadline_ms).
    """

    estimator: Literal["ema", "rwt", "loadAware"] = "ema"
    """ema = the averages of earlyRejection alone; rwt = the formula of QLM with time per token and
    mean output adapted online; loadAware = the waiting line played forward with measured lengths
    and step times.
    """
    allow_client_deadline: bool = False
    """Honour deadline_ms of a request: of equal priority the earliest deadline goes first, and a
    request without one as if it had 60 s. While it is false a deadline is refused with 400.
    """
    reject_unmeetable: bool = False
    """Refuse a request with 503 and the estimate, where that is beyond its deadline."""
    late_groups: Literal["Keep", "Defer", "Evict"] = "Keep"
    """Effect on request groups that are forecast to make others late. Keep = all go by their
    deadlines; Defer = those wait behind the others of their priority if fewer requests are late so,
    until they are late by as much time as they had; Evict = their running requests make way too,
    and go on later.
    """
    slo_granularity_seconds: Annotated[float, Field(ge=0.001, le=86400.0)] = 100.0
    """Deadlines in one such step are one class, of which lengths of answers are learned; requests
    of one class that are due in one such step are a request group.
    """
    preset_token_milliseconds: Milliseconds | None = None
    """Time of an output token until it was measured; by default nothing is estimated before."""
    preset_output_tokens: Positive = 256
    """Tokens of an answer until they were measured."""

    RULES = (
        Rule(
            cel="!(has(self.rejectUnmeetable) && self.rejectUnmeetable) || has(self.estimator) && "
            "self.estimator != 'ema'",
            holds=lambda estimation: (
                not estimation.reject_unmeetable or estimation.estimator != "ema"
            ),
            reason="needs an estimate of the completion, and estimator ema has none",
            fix="set estimator to rwt or loadAware, or leave it out",
            at="rejectUnmeetable",
        ),
        Rule(
            cel="!has(self.lateGroups) || self.lateGroups == 'Keep' || has(self.estimator) && "
            "self.estimator != 'ema' && has(self.allowClientDeadline) && self.allowClientDeadline",
            holds=lambda estimation: (
                estimation.late_groups == "Keep"
                or (estimation.estimator != "ema" and estimation.allow_client_deadline)
            ),
            reason="needs deadlines, and forecasts that estimator ema has not",
            fix="set allowClientDeadline: true and estimator: rwt or loadAware, or leave it out",
            at="lateGroups",
        ),
    )


class TenantSpec(SpecSection):
    """One tenant."""

    priority: Tier | None = None
    """The highest priority that its requests may have, and what they have when they ask for none;
    by default normal, and as high as allowClientPriority lets them.
    """
    requests_per_second: Above0 | None = None
    """Average rate; as many may come at once as in one second, and one at least. Each choice of
    each prompt is one. Beyond it 429.
    """
    max_concurrent_requests: Positive | None = None
    """Requests that have begun and not ended, each choice of each prompt is one; beyond it 429."""
    tokens_per_minute: Positive | None = None
    """Tokens of prompts and answers, on average; a minute's may come at once. Beyond it 429."""


class QosSpec(SpecSection):
    """Policy of admission, and of giving up a stalled engine; takes effect without a restart."""

    admission: AdmissionSpec = AdmissionSpec()
    slo: SloSpec = SloSpec()
    early_rejection: EarlyRejectionSpec = EarlyRejectionSpec()
    high_priority: HighPrioritySpec = HighPrioritySpec()
    low_priority: LowPrioritySpec = LowPrioritySpec()
    degradation: DegradationSpec = DegradationSpec()
    estimation: EstimationSpec = EstimationSpec()
    tenant_defaults: TenantSpec = TenantSpec()
    """Limits of the requests with any one API key, unless tenants has it; without keys, of all
    requests together. Each ingress worker lets through an even share.
    """
    tenants: Annotated[dict[str, TenantSpec], Field(max_length=MAX_TENANTS)] = Field(
        default_factory=dict
    )
    """Limits of the requests with one API key, by the key of service.apiKeySecret that holds it.
    Each ingress worker lets through an even share.
    """
    stall_seconds: Annotated[int, Field(ge=1, le=3600)] | None = None
    """Time beyond its longest step of the last hour, or of its warm-up, for which an engine may
    have work and make no step, or answer no ping. By default 20, and 120 where a worker computes on
    an accelerator, whose kernels may be compiled in the middle of a step. After it the worker is
    neither live nor ready, its peers go elsewhere and prefill by themselves what it was to prefill,
    and it is restarted. Raise it for engines whose steps vary much.
    """
    allow_client_priority: bool = False
    """Honour the field priority of a request (high, normal, low, or -1000 to 1000, lower goes
    first, 0 when left out). Any client could then overtake all others; while it is false a priority
    other than 0 is refused with 400.
    """
