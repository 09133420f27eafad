"""Preview of the autoscaler's first decision without load: bounds, schedules, budget, ratio.

Pods and nodes are not considered: every role keeps its size as far as these allow.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, time, timedelta
from zoneinfo import ZoneInfo

from pdcluster_api.plan.autoscale.base import bounds_of, conflict, is_on
from pdcluster_api.plan.autoscale.decide import decide
from pdcluster_api.plan.autoscale.values import Clock, Memory, PoolFacts
from pdcluster_api.plan.cluster import sizes_of
from pdcluster_api.plan.observed.state import Observed, Problem, ScalingDecision
from pdcluster_api.plan.sizes import PoolSize
from pdcluster_api.plan.status.autoscaled import OFF, ON
from pdcluster_schema.autoscale import ScheduleSpec
from pdcluster_schema.pdcluster import PDCluster, PDClusterSpec


def forecast(cluster: PDCluster, observed: Observed, now: str) -> Observed:
    """`observed` with that decision, unless the mode is not On.  now: RFC 3339."""
    if cluster.spec.autoscale.mode != ON:
        return observed
    wall = datetime.fromisoformat(now)
    facts = [_steady_facts(size) for size in sizes_of(cluster, observed)]
    outcome = decide(cluster.spec, facts, {}, Memory(), Clock(0.0, wall))
    return replace(observed, decision=outcome.decision)


def _steady_facts(size: PoolSize) -> PoolFacts:
    """A pool at its requested size, without metrics."""
    role, pool = size.key
    return PoolFacts(
        role,
        pool,
        size.pool.gpu,
        replicas=size.desired,
        current=size.desired,
        ready=0,
        gpus_per_replica=size.gpus_per_replica,
    )


def upcoming_conflicts(spec: PDClusterSpec, now: str) -> Iterator[Problem]:
    """Bounds that conflict when a schedule begins within a week.  now: RFC 3339."""
    if spec.autoscale.mode == OFF:
        return
    wall, roles = datetime.fromisoformat(now), spec.roles.present()
    for schedule in spec.autoscale.schedules:
        pool = next(pool for pool in roles[schedule.role].pools if pool.name == schedule.pool)
        for begin in _beginnings(schedule, wall):
            low, high, _ = bounds_of(schedule.role, pool, spec.autoscale.schedules, begin)
            if problem := conflict(f"{schedule.role}/{schedule.pool}", low, high):
                text = (
                    f"when schedule {schedule.name} begins, {begin:%a %H:%M} {schedule.time_zone}: "
                    f"{problem.message}"
                )
                yield Problem(problem.reason, text)
                break


def _beginnings(schedule: ScheduleSpec, wall: datetime) -> Iterator[datetime]:
    zone = ZoneInfo(schedule.time_zone)
    today = wall.astimezone(zone).date()
    for day in range(8):
        begin = datetime.combine(
            today + timedelta(days=day), time.fromisoformat(schedule.start), zone
        )
        if begin > wall and is_on(schedule, begin):
            yield begin


def why_resized(record: ScalingDecision | None, size: PoolSize) -> str | None:
    """None = the autoscaler keeps the pool's size."""
    steps = () if record is None else record.steps
    subject = "/".join(size.key)
    mine = [step for step in steps if step.subject == subject and step.before != step.after]
    if not mine or mine[0].before == mine[-1].after:
        return None
    causes = [
        step for step in steps if step.subject in (subject, size.role) and step.before != step.after
    ]
    return "; ".join(f"{step.rule}: {step.why}" for step in causes)
