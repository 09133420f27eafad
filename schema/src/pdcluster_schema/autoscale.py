"""The section `autoscale` of a PDCluster spec: what each role is judged by, and how far and how
fast it may move.

Frozen models as in `sections`.
Policy: a change takes effect at once and makes no new revision.
"""

from typing import Annotated, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field, model_validator

from pdcluster_schema.rules import rule, spelled
from pdcluster_schema.section import Many, SpecSection
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
)


class PrefillScalingSpec(SpecSection):
    """Thresholds of prefill: it scales up when any signal is over its threshold, and down when
    all are under theirs.

    queue_up, queue_down:             requests of the whole prefill queue
    backlog_up_seconds:               seconds that the queue's tokens take at the measured prefill
                                      rate; None = not looked at
    utilization_up, utilization_down: share of time in an engine step, or of the GPU where there is
                                      one
    ttft_seconds:                     target for the mean time to first token; None = no target
    headroom:                         share of workers kept above the measured need
    """

    queue_up: Positive = 8
    queue_down: Natural = 2
    backlog_up_seconds: Seconds | None = None
    utilization_up: Ratio = 0.80
    utilization_down: Ratio = 0.40
    ttft_seconds: Seconds | None = None
    headroom: Ratio = 0.0


class DecodeScalingSpec(SpecSection):
    """Thresholds of decode (or mixed).

    queue_up, queue_down:       requests that wait in its engines, in all
    kv_usage_up, kv_usage_down: share of KV blocks that hold live tokens
    tpot_seconds:               target for the mean time per output token; None = no target
    """

    queue_up: Positive = 16
    queue_down: Natural = 4
    kv_usage_up: Ratio = 0.75
    kv_usage_down: Ratio = 0.30
    tpot_seconds: Seconds | None = None


Window = Annotated[int, Field(ge=0, le=3600)]
"""Seconds, all of whose decisions are remembered."""


class ScaleUpSpec(SpecSection):
    """Speed at which a role grows.

    window_seconds: how long every decision must have agreed
    max_step:       most workers of a role in one decision; 0 = no limit.  4, as the HPA's own
                    default, so that wrong numbers cost little before a user looks
    """

    window_seconds: Window = 0
    max_step: Natural = 4


class ScaleDownSpec(SpecSection):
    """Speed at which a role shrinks; as in ScaleUpSpec."""

    window_seconds: Window = 300
    max_step: Natural = 1


class RatioSpec(SpecSection):
    """Bounds of prefill capacity over decode capacity, each weighted by its accelerators; None
    = no bound.
    """

    min: Above0 | None = None
    max: Above0 | None = None


class BudgetSpec(SpecSection):
    """Most accelerators of all pools together, pods that still end included; a worker counts with
    all it has, one without any as one, a router as none.

    per_gpu: by type, as in pools[].gpu.
    """

    total: AcceleratorCount | None = None
    per_gpu: dict[str, AcceleratorCount] = Field(default_factory=dict)


TimeOfDay = Annotated[
    str, spelled(r"([01][0-9]|2[0-3]):[0-5][0-9]", "a time of day", "write HH:MM, as in 08:30")
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
    """Other bounds of a pool at some hours: one of them at least.

    start, end: HH:MM in time_zone; an end before the start is on the next day
    days:       on which it starts; none = every day
    """

    name: Name
    role: Literal["prefill", "decode", "mixed"]
    pool: Name
    start: TimeOfDay
    end: TimeOfDay
    days: Annotated[tuple[Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"], ...], Many] = ()
    time_zone: Annotated[str, AfterValidator(_time_zone)] = "UTC"
    min_replicas: Replicas | None = None
    max_replicas: Replicas | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.min_replicas, self.max_replicas
        if low is None and high is None:
            raise rule("changes nothing", "give minReplicas, maxReplicas or both")
        if low is not None and high is not None and low > high:
            raise rule(
                f"must be at most maxReplicas ({high}), not {low}",
                "lower minReplicas or raise maxReplicas",
                at="minReplicas",
            )
        return self


class AutoscaleSpec(SpecSection):
    """Mode and rules of scaling by metrics.

    mode:                  Off = `kubectl scale`; Advise = as Off, and decisions are shown; On = the
                           autoscaler alone
    interval_seconds:      between two scrapes, and two decisions
    stale_after:           scrapes in a row that a worker may miss
    tolerance:             differences within this share of a threshold do nothing
    cost:                  relative price of one accelerator by type; of equal ones the pool that
                           stands first is the cheaper
    capacity_seconds:      how long a pod may be unschedulable before its request is given back
    backoff_seconds:       how long a GPU type without room is left alone
    """

    mode: Literal["Off", "Advise", "On"] = "Off"
    interval_seconds: Annotated[int, Field(ge=5, le=3600)] = 5
    stale_after: Annotated[int, Field(ge=1, le=100)] = 3
    prefill: PrefillScalingSpec = PrefillScalingSpec()
    decode: DecodeScalingSpec = DecodeScalingSpec()
    scale_up: ScaleUpSpec = ScaleUpSpec()
    scale_down: ScaleDownSpec = ScaleDownSpec()
    tolerance: Ratio = 0.10
    ratio: RatioSpec = RatioSpec()
    budget: BudgetSpec = BudgetSpec()
    schedules: Annotated[tuple[ScheduleSpec, ...], Many] = ()
    cost: dict[str, Above0] = Field(default_factory=dict)
    capacity_seconds: WholeSeconds = 120
    backoff_seconds: WholeSeconds = 600

    @model_validator(mode="after")
    def _check(self) -> Self:
        prefill, decode = self.prefill, self.decode
        for at, low, high in (
            ("prefill.queueDown", prefill.queue_down, prefill.queue_up),
            ("prefill.utilizationDown", prefill.utilization_down, prefill.utilization_up),
            ("decode.queueDown", decode.queue_down, decode.queue_up),
            ("decode.kvUsageDown", decode.kv_usage_down, decode.kv_usage_up),
        ):
            if low >= high:
                reason = f"must be less than its scale-up threshold ({high}), not {low}"
                raise rule(reason, "lower it, or raise the scale-up threshold", at=at)
        names = [schedule.name for schedule in self.schedules]
        for index, name in enumerate(names):
            if name in names[:index]:  # what decisions call it
                raise rule(
                    f"{name} is given twice",
                    "give each schedule a name of its own",
                    at=f"schedules[{index}].name",
                )
        if (
            self.ratio.min is not None
            and self.ratio.max is not None
            and self.ratio.min > self.ratio.max
        ):
            raise rule(
                f"must be at most ratio.max ({self.ratio.max}), not {self.ratio.min}",
                "lower min or raise max",
                at="ratio.min",
            )
        return self
