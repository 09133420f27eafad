"""Rollout of a PDCluster spec: how workers of an old revision are replaced."""

import re
from typing import Annotated, Literal

from pydantic import Field, PlainValidator
from pydantic.alias_generators import to_snake

from pdcluster_schema.section import Cel, Crd, Rule, SpecSection, rule
from pdcluster_schema.values import MAX_SECONDS, MAX_WORKERS, Positive, WholeSeconds

_SHARE = re.compile(r"(100|[1-9]?[0-9])%")


def _share(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_WORKERS:
        return value
    if isinstance(value, str) and _SHARE.fullmatch(value):
        return value
    raise rule(f"{value!r} is not a number of workers", _ANY_SHARE)


_ANY_SHARE = (
    f"write 0 to {MAX_WORKERS} workers, or a percentage of the role's accelerators in quotes such "
    'as "25%"'
)
WorkerShare = Annotated[
    int | str,
    PlainValidator(_share),
    Crd(
        Cel(
            f"type(self) == int ? self >= 0 && self <= {MAX_WORKERS} : "
            "self.matches('^(100|[1-9]?[0-9])%$')",
            f"not a number of workers: {_ANY_SHARE}",
        ),
        maxLength=4,
    ),
]
"""Workers of a role, or a percentage of its accelerators."""


def workers_of_share(share: int | str, accelerators: int, per_worker: int) -> int:
    """Whole workers of a share of so many accelerators.

    >>> workers_of_share("25%", 64, 8), workers_of_share("10%", 64, 8), workers_of_share(3, 64, 8)
    (2, 0, 3)
    """
    if isinstance(share, int):
        return share
    return int(share.removesuffix("%")) * accelerators // (100 * per_worker)


def smallest_percentage(accelerators: int, per_worker: int) -> int:
    """That of so many accelerators which is one worker."""
    return min(100, -(-100 * per_worker // accelerators))


def _is_0(field: str) -> str:
    return f"type(self.{field}) == int ? self.{field} == 0 : self.{field} == '0%'"


def _for_rolling(field: str) -> Rule:
    name = to_snake(field)
    return Rule(
        cel=f"!has(self.{field}) || self.?strategy.orValue('Rolling') == 'Rolling'",
        holds=lambda spec: getattr(spec, name) is None or spec.strategy in (None, "Rolling"),
        reason="is for strategy: Rolling",
        fix="set that, or leave one of them out",
        at=field,
    )


def _with_gates(field: str) -> Rule:
    name = to_snake(field)
    return Rule(
        cel=f"!has(self.{field}) || has(self.onFailure)",
        holds=lambda spec: getattr(spec, name) is None or spec.on_failure is not None,
        reason="is for roll outs with gates, which onFailure asks for",
        fix="give onFailure too, or leave it out",
        at=field,
    )


Strategy = Literal["BlueGreen", "Rolling", "Recreate"]
ROLLING_FIELDS = ("maxSurge", "maxUnavailable", "onFailure")
"""Fields that ask for Rolling where no strategy is given."""


class RolloutSpec(SpecSection):
    """Replacement of an old revision by a new one."""

    strategy: Strategy | None = None
    """BlueGreen = all new workers beside the old ones, then traffic switches; Rolling = step by
    step, within maxSurge, maxUnavailable and autoscale.budget, while both serve; Recreate = the old
    ones end first.  By default Rolling where a field of Rolling is given, or where a pool of
    workers has accelerators and the cluster has no routers or pickers of its own; else BlueGreen.
    """
    max_surge: WorkerShare | None = None
    """Workers of each role that Rolling may have beyond those that are wanted, or a percentage of
    the role's accelerators such as "25%"; by default 1.
    """
    max_unavailable: WorkerShare | None = None
    """Workers of each role that Rolling may do without where there is no room for new ones beside
    the old, or a percentage as for maxSurge; by default 0.
    """
    on_failure: Literal["Pause", "Rollback"] | None = None
    """Asks for a gate after each step of Rolling: the next one begins when all workers of the step
    have been ready for bakeSeconds, and KV was seen to move between those of the new revision.
    Where that fails, Pause = the roll out stays as it is; Rollback = the old revision comes back,
    and the new one is not tried again until the spec changes.  By default there are no gates.
    """
    bake_seconds: Annotated[int, Field(ge=0, le=MAX_SECONDS)] | None = None
    """Seconds for which the workers of a step have to stay ready before the next one; by default
    0.
    """
    when_unknown: Literal["Pause", "Continue"] | None = None
    """Outcome of a gate of which a fact is unknown when bakeSeconds are over, such as KV that could
    not be verified: Pause = it waits until all are; Continue = it passes.  By default Pause.
    """
    min_requests: Positive | None = None
    """Requests of the new revision, since its workers of a step are ready, from which its latencies
    count; asks the gate for them: they have to hold autoscale.objective, or be no worse than those
    of the old revision in the same time.  By default they are not looked at.
    """
    grace_period_seconds: Annotated[int, Field(ge=10, le=MAX_SECONDS)] = 300
    """Seconds that a stopped worker has to finish its streams before it is killed."""
    drain_timeout_seconds: WholeSeconds | None = None
    """Seconds that a worker which is scaled away has to finish its streams before it is stopped; by
    default as long as it takes.
    """
    progress_deadline_seconds: Annotated[int, Field(ge=30, le=MAX_SECONDS)] = 3600
    """Seconds for which no more workers of a new revision need become ready. Then the object has
    stalled, and while another revision serves the new one is scaled to 0, until the spec or this
    number changes.
    """

    RULES = (
        *(_for_rolling(field) for field in ROLLING_FIELDS),
        _with_gates("bakeSeconds"),
        _with_gates("whenUnknown"),
        _with_gates("minRequests"),
        Rule(
            cel="self.?strategy.orValue('Rolling') != 'Rolling' || !has(self.maxSurge) || "
            f"!({_is_0('maxSurge')}) || has(self.maxUnavailable) && !({_is_0('maxUnavailable')})",
            holds=lambda spec: (
                not spec.implies_rolling or not {spec.surge, spec.unavailable} <= {0, "0%"}
            ),
            reason="and maxUnavailable are 0, so no worker could be replaced",
            fix="set one of them to 1 or more",
            at="maxSurge",
        ),
    )

    @property
    def implies_rolling(self) -> bool:
        """True if it names Rolling, or gives fields that are for it alone."""
        if self.strategy is not None:
            return self.strategy == "Rolling"
        return any(getattr(self, to_snake(field)) is not None for field in ROLLING_FIELDS)

    @property
    def surge(self) -> int | str:
        return 1 if self.max_surge is None else self.max_surge

    @property
    def unavailable(self) -> int | str:
        return 0 if self.max_unavailable is None else self.max_unavailable

    def limits(self, accelerators: int, per_worker: int) -> tuple[int, int]:
        """Workers of a role by maxSurge and maxUnavailable."""
        surge, unavailable = (
            workers_of_share(share, accelerators, per_worker)
            for share in (self.surge, self.unavailable)
        )
        return surge, unavailable

    def steps(self, accelerators: int, per_worker: int) -> tuple[int, int]:
        """The same, and one worker for a role that is smaller than its file says."""
        surge, unavailable = self.limits(accelerators, per_worker)
        if surge or unavailable:
            return surge, unavailable
        has_no_surge = self.max_surge in (0, "0%") and self.max_unavailable is not None
        return (0, 1) if has_no_surge else (1, 0)
