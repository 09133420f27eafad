"""Bounds of a pool at a time: its own min and max, or those of the schedules that are on.

The one place that reads the wall clock.  A schedule is on by the clock of its
own time zone, also where summer time makes an hour twice or not at all.  Of
several that are on, the last that gives a bound counts.  If bounds exclude each
other, as those of an old object may, max wins.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

from pdcluster_api.plan.observed.problem import Problem
from pdcluster_schema import conditions
from pdcluster_schema.autoscale import ScheduleSpec
from pdcluster_schema.sections import PoolSpec
from pdcluster_schema.values import MAX_REPLICAS

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
    """Return whether a schedule is on.

    An end before the start is on the next day; equal ones mean the whole day.
    """
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
