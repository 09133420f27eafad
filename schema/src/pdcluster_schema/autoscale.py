"""The section `autoscale` of a PDCluster spec: what each role is judged by, and how far and how
fast it may move.

Frozen models as in `sections`.
Policy: a change takes effect at once and makes no new revision.
"""

from typing import Annotated, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field, model_validator

from pdcluster_schema.latency import LATENCY_BUCKETS
from pdcluster_schema.section import (
    Cel,
    Crd,
    Many,
    Rule,
    SpecSection,
    ascending,
    rule,
    spelled,
    values_of,
)
from pdcluster_schema.values import (
    Above0,
    AcceleratorCount,
    Name,
    Natural,
    Positive,
    Ratio,
    Replicas,
    Seconds,
    WholeSeconds,
    is_label,
)


def _down(low: str, high: str) -> Rule:
    """low, high: thresholds to scale down and up."""

    def holds(role: SpecSection) -> bool:
        down, up = values_of(role, low, high)
        return bool(down < up)

    return Rule(
        cel=f"self.{low} < self.{high}",
        holds=holds,
        reason=f"must be less than {{{high}}}",
        fix="lower it, or raise the scale-up threshold",
        at=low,
    )


class PrefillScalingSpec(SpecSection):
    """Thresholds at which prefill scales up (any signal over its own) and down (all under
    theirs).
    """

    queue_up: Positive = 8
    """Requests of the whole prefill queue over which it grows."""
    queue_down: Natural = 2
    """Requests of the whole prefill queue at which it may shrink."""
    backlog_up_seconds: Seconds | None = None
    """Seconds that the queue's tokens take at the measured prefill rate, over which it grows; by
    default not looked at.
    """
    utilization_up: Ratio = 0.80
    """Share of time in an engine step, or of the GPU where there is one, over which it grows."""
    utilization_down: Ratio = 0.40
    """The same, at which it may shrink."""
    ttft_seconds: Seconds | None = None
    """The same as `objective.ttft` with these seconds and no percentile."""
    headroom: Ratio = 0.0
    """Share of workers kept above the measured need."""

    RULES = (_down("queueDown", "queueUp"), _down("utilizationDown", "utilizationUp"))


class DecodeScalingSpec(SpecSection):
    """Thresholds at which decode (or mixed) scales up (any signal over its own) and down (all under
    theirs).
    """

    queue_up: Positive = 16
    """Requests that wait in its engines, in all, over which it grows."""
    queue_down: Natural = 4
    """Requests that wait in its engines, in all, at which it may shrink."""
    kv_usage_up: Ratio = 0.75
    """Share of KV blocks that hold live tokens over which it grows."""
    kv_usage_down: Ratio = 0.30
    """The same, at which it may shrink."""
    tpot_seconds: Seconds | None = None
    """The same as `objective.itl` with these seconds and no percentile."""

    RULES = (_down("queueDown", "queueUp"), _down("kvUsageDown", "kvUsageUp"))


class LatencyObjectiveSpec(SpecSection):
    """A latency that a role is to hold."""

    seconds: Seconds
    """Seconds over which the role grows; it shrinks only where fewer workers are expected to hold
    them.
    """
    percentile: Annotated[int, Field(ge=1, le=99)] | None = None
    """Percentile that is to hold them, such as 90; by default the mean."""

    @model_validator(mode="after")
    def _is_within_the_buckets(self) -> Self:
        """A percentile is the last bound at most, so one beyond it would never be over."""
        most = LATENCY_BUCKETS[-2]
        if self.percentile is not None and self.seconds > most:
            raise rule(
                f"must be at most {most:g} with a percentile, the last bound of the workers' "
                f"buckets but one, not {self.seconds:g}",
                "lower it, or remove percentile, for the mean",
                at="seconds",
            )
        return self


class ObjectiveSpec(SpecSection):
    """Latencies that the roles are to hold, as clients see them."""

    ttft: LatencyObjectiveSpec | None = None
    """Time to first token, held by prefill, or by mixed workers; by default none."""
    itl: LatencyObjectiveSpec | None = None
    """Time between two tokens, held by decode, or by mixed workers; by default none."""
    queue: LatencyObjectiveSpec | None = None
    """Part of the time to first token that a request waits for its prefill to begin, held by
    prefill, or by mixed workers; by default none, and not with a stock engine, which does not say
    it.
    """


Window = Annotated[int, Field(ge=0, le=3600)]
"""Seconds, all of whose decisions are remembered."""


class ScaleUpSpec(SpecSection):
    """Rate at which a role scales up."""

    window_seconds: Window = 0
    """Seconds for which every decision must have agreed."""
    max_step: Natural = 4
    """Most workers of a role in one decision, so that wrong metrics add few workers before an alert
    is seen; 0 = no limit.
    """


class ScaleDownSpec(SpecSection):
    """Rate at which a role scales down."""

    window_seconds: Window = 300
    """Seconds for which every decision must have agreed."""
    max_step: Natural = 1
    """Most workers of a role in one decision; 0 = no limit."""


class RatioSpec(SpecSection):
    """Bounds of prefill capacity over decode capacity; a worker weighs what all its accelerators
    do.
    """

    min: Above0 | None = None
    """Least prefill capacity for each unit of decode capacity; by default no bound."""
    max: Above0 | None = None
    """Most prefill capacity for each unit of decode capacity; by default no bound."""

    RULES = (ascending("min", "max"),)


class BudgetSpec(SpecSection):
    """Most accelerators of all pools together, pods that still end included; a worker counts with
    all it has (gpusPerReplica, or one for each rank), one without any as one, a router as none. It
    bounds the autoscaler; what a BlueGreen roll out needs beyond it is in the condition
    RolloutOverBudget before it starts.
    """

    total: AcceleratorCount | None = None
    """Most of all types together; by default no limit."""
    per_gpu: Annotated[dict[str, AcceleratorCount], Crd(maxProperties=64)] = Field(
        default_factory=dict
    )
    """Most by type, as in the gpu of pools; a type that is not named has no limit."""


TimeOfDay = Annotated[
    str,
    Crd(maxLength=5),
    spelled(r"([01][0-9]|2[0-3]):[0-5][0-9]", "a time of day", "write HH:MM, as in 08:30"),
]


def _time_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError) as e:
        raise rule(
            f"{name!r} is not a known time zone",
            "use a name of the tz database, such as Europe/Berlin, or UTC",
        ) from e
    return name


class ScheduleSpec(SpecSection):
    """Other bounds of one pool at some hours."""

    name: Name
    """Name in decisions."""
    role: Literal["prefill", "decode", "mixed"]
    """Role of the pool."""
    pool: Name
    """One of that role's pools."""
    start: TimeOfDay
    """HH:MM in timeZone, from which on it counts."""
    end: TimeOfDay
    """HH:MM in timeZone, until which it counts; before the start = on the next day, the same = for
    a whole day.
    """
    days: Annotated[
        tuple[Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"], ...],
        Many,
        Crd(maxItems=7, list_type="atomic"),
    ] = ()
    """Days on which it starts; by default every day."""
    time_zone: Annotated[str, Crd(minLength=1, maxLength=64), AfterValidator(_time_zone)] = "UTC"
    """Name in the tz database, such as Europe/Berlin; an unknown one makes the object InvalidSpec.
    """
    min_replicas: Replicas | None = None
    """Bound in place of the pool's; by default the pool's own."""
    max_replicas: Replicas | None = None
    """Bound in place of the pool's; by default the pool's own."""

    RULES = (
        Rule(
            cel="has(self.minReplicas) || has(self.maxReplicas)",
            holds=lambda bounds: (bounds.min_replicas, bounds.max_replicas) != (None, None),
            reason="the schedule changes nothing",
            fix="give minReplicas, maxReplicas or both",
        ),
        ascending("minReplicas", "maxReplicas"),
        is_label("self.name", ".name"),
    )


class AutoscaleSpec(SpecSection):
    """Autoscaling of the pools by metrics of the workers. A change takes effect at once and makes
    no new revision.
    """

    mode: Literal["Off", "Advise", "On"] = "Off"
    """Off = `kubectl scale` and the pools' replicas; Advise = as Off, and status.autoscaling shows
    what would be done; On = the autoscaler alone, from the present replicas on; every pool then
    needs maxReplicas, or budget.total is given.
    """
    interval_seconds: Annotated[int, Field(ge=5, le=3600)] = 5
    """Seconds between two scrapes of the workers, and two decisions."""
    stale_after: Annotated[int, Field(ge=1, le=100)] = 3
    """Scrapes in a row that a worker may miss and still count with its last numbers."""
    prefill: PrefillScalingSpec = PrefillScalingSpec()
    decode: DecodeScalingSpec = DecodeScalingSpec()
    objective: ObjectiveSpec = ObjectiveSpec()
    scale_up: ScaleUpSpec = ScaleUpSpec()
    scale_down: ScaleDownSpec = ScaleDownSpec()
    tolerance: Ratio = 0.10
    """Differences within this share of a threshold do nothing."""
    ratio: RatioSpec = RatioSpec()
    budget: BudgetSpec = BudgetSpec()
    schedules: Annotated[
        tuple[ScheduleSpec, ...],
        Many,
        Crd(
            Cel(
                "self.all(s, self.exists_one(t, t.name == s.name))",
                "two schedules have the same name: give each a name of its own",
            ),
            maxItems=32,
            list_type="atomic",
        ),
    ] = ()
    """Other bounds of pools at some hours; of several that are on, the last counts."""
    cost: Annotated[dict[str, Above0], Crd(maxProperties=64)] = Field(default_factory=dict)
    """Relative price of one accelerator by type, whatever number a worker has, 1 where none is
    given; the cheapest pool grows first, the dearest shrinks first.
    """
    capacity_seconds: WholeSeconds = 120
    """Seconds that a pod may be unschedulable before its request is given back."""
    backoff_seconds: WholeSeconds = 600
    """Seconds that a type of accelerator without room is left alone."""

    @property
    def fresh_seconds(self) -> int:
        """Age up to which a round of scrapes counts."""
        return (self.stale_after + 1) * self.interval_seconds

    @property
    def has_latency_objective(self) -> bool:
        """True if a latency of requests has one, of which the queue is a part alone."""
        given = (self.objective.ttft, self.objective.itl)
        seconds = (self.prefill.ttft_seconds, self.decode.tpot_seconds)
        return any(each is not None for each in (*given, *seconds))

    @model_validator(mode="after")
    def _each_objective_is_given_once(self) -> Self:
        for new, old, both in (
            ("ttft", "prefill.ttftSeconds", (self.objective.ttft, self.prefill.ttft_seconds)),
            ("itl", "decode.tpotSeconds", (self.objective.itl, self.decode.tpot_seconds)),
        ):
            if None not in both:
                raise rule(
                    f"says the same as objective.{new}",
                    f"remove it: objective.{new} counts, without percentile for the mean",
                    at=old,
                )
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [schedule.name for schedule in self.schedules]
        for index, name in enumerate(names):
            if name in names[:index]:  # what decisions call it
                raise rule(
                    f"{name} is given twice",
                    "give each schedule a name of its own",
                    at=f"schedules[{index}].name",
                )
        return self
