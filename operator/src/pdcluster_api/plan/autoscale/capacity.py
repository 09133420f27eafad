"""Bounds of each pool at a time, and the edge of capacity: pods that no node takes, or that cannot
be created. A GPU type whose pods wait longer than `capacitySeconds` is asked for nothing more for
`backoffSeconds`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.pools import Pool
from pdcluster_api.plan.autoscale.values import DecisionTrace
from pdcluster_api.plan.observed.state import Problem
from pdcluster_schema import conditions
from pdcluster_schema.autoscale import AutoscaleSpec, ScheduleSpec
from pdcluster_schema.sections import PoolSpec
from pdcluster_schema.values import MAX_REPLICAS


def backoff_until(
    pools: Sequence[Pool], spec: AutoscaleSpec, backoff: Mapping[str, float], now: float
) -> Mapping[str, float]:
    """Until when each GPU type is left alone, those that pods wait for now included."""
    until = {gpu: at for gpu, at in backoff.items() if now < at <= now + spec.backoff_seconds}
    waiting = [pool.facts.gpu for pool in pools if _num_waiting(pool, spec)]
    return until | dict.fromkeys(waiting, now + spec.backoff_seconds)


def probe_capacity(
    pools: Sequence[Pool], spec: AutoscaleSpec, backoff: Mapping[str, float], trace: DecisionTrace
) -> list[Pool]:
    """The pools with what is short and lost, what is given back, and those closed that may not
    grow.  At least one worker of a role stays asked for.
    """
    workers: Counter[str] = Counter()
    for pool in pools:
        workers[pool.role] += pool.facts.replicas
    found = []
    for pool in pools:
        facts, waiting = pool.facts, _num_waiting(pool, spec)
        tops = min(facts.unschedulable_top, waiting, facts.replicas)
        released = max(0, min(tops, facts.replicas - pool.low, workers[pool.role] - 1))
        workers[pool.role] -= released
        why = (
            f"{facts.unschedulable} pods have found no node for {facts.unschedulable_seconds:.0f} "
            f"s: {facts.gpu} has no room"
        )
        trace.step(rules.CAPACITY, pool.name, (facts.replicas, facts.replicas - released), why)
        lost = max(0, waiting - released) + _num_refused(pool)
        is_open = facts.fault is None and facts.gpu not in backoff
        found.append(replace(pool, is_open=is_open, short=waiting, released=released, lost=lost))
    return found


def _num_waiting(pool: Pool, spec: AutoscaleSpec) -> int:
    facts = pool.facts
    return facts.unschedulable if facts.unschedulable_seconds >= spec.capacity_seconds else 0


def _num_refused(pool: Pool) -> int:
    facts = pool.facts
    return 0 if facts.fault is None else max(0, facts.replicas - facts.current)


def _each_of(gpu: str, pools: Sequence[Pool]) -> str:
    numbers = sorted({pool.facts.gpus_per_replica for pool in pools if pool.facts.gpu == gpu})
    return "" if numbers in ([], [1]) else f" of {' or '.join(map(str, numbers))} accelerators"


def capacity_problems(
    pools: Sequence[Pool], backoff: Mapping[str, float], missing: Mapping[str, int]
) -> Iterator[Problem]:
    """CapacityShort for every GPU type with waiting pods, or in back-off while its workers are
    missing.  missing: workers by role that are needed and that no open pool takes
    """
    short: Counter[str] = Counter()
    for pool in pools:
        short[pool.facts.gpu] += pool.short
    for gpu in backoff:
        roles = {pool.role for pool in pools if pool.facts.gpu == gpu}
        short[gpu] = max(short[gpu], sum(missing.get(role, 0) for role in roles))
    for gpu, number in sorted((+short).items()):
        workers = "1 worker" if number == 1 else f"{number} workers"
        message = (
            f"{gpu} is short of {workers}{_each_of(gpu, pools)} that no node takes; nothing more "
            "is asked of it while a pod waits, nor for backoffSeconds after that"
        )
        yield Problem(conditions.CAPACITY_SHORT, message)
    for pool in pools:
        fault = pool.facts.fault
        if fault is not None and (missing.get(pool.role) or _num_refused(pool)):
            message = f"{pool.facts.gpu}: pods of {pool.name} cannot be created: {fault}"
            yield Problem(conditions.CAPACITY_SHORT, message)


_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY_MINUTES = 24 * 60


def bounds_of(
    role: str, pool: PoolSpec, schedules: Iterable[ScheduleSpec], wall: datetime
) -> tuple[int, int, str]:
    """(min, max, source of the bounds) of a pool at a time."""
    low, high, source = pool.min_replicas or 0, pool.max_replicas, "minReplicas and maxReplicas"
    for schedule in schedules:
        if (schedule.role, schedule.pool) == (role, pool.name) and is_on(schedule, wall):
            low = low if schedule.min_replicas is None else schedule.min_replicas
            high = high if schedule.max_replicas is None else schedule.max_replicas
            source = f"schedule {schedule.name}"
    return low, MAX_REPLICAS if high is None else high, source


def conflict(name: str, low: int, high: int) -> Problem | None:
    """Problem of bounds that exclude each other; None = they do not.  name: role/pool."""
    if low <= high:
        return None
    message = (
        f"{name}: minReplicas is {low} and maxReplicas is {high}: {high} counts; lower minReplicas "
        "or raise maxReplicas"
    )
    return Problem(conditions.BOUNDS_CONFLICT, message)


def is_on(schedule: ScheduleSpec, wall: datetime) -> bool:
    """An end before the start is on the next day; equal ones mean the whole day."""
    local = wall.astimezone(_zone(schedule.time_zone))
    minute = local.hour * 60 + local.minute
    start, end = _minute(schedule.start), _minute(schedule.end)
    length = (end - start) % _DAY_MINUTES or _DAY_MINUTES
    if start <= minute < start + length:
        return _starts_on(schedule, local)
    return minute + _DAY_MINUTES < start + length and _starts_on(
        schedule, local - timedelta(days=1)
    )


def _starts_on(schedule: ScheduleSpec, local: datetime) -> bool:
    return not schedule.days or _DAYS[local.weekday()] in schedule.days


def _minute(text: str) -> int:
    hours, minutes = text.split(":")
    return int(hours) * 60 + int(minutes)


@cache
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)
