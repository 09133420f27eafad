"""Begin a decision: bounds at a time, the edge of capacity, and sizes within the budget. An
exceeded budget takes workers away at once, below minReplicas too, but never a role's last ready
worker.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from heapq import heapify, heappop, heapreplace
from zoneinfo import ZoneInfo

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.allocate import Allocation
from pdcluster_api.plan.autoscale.pools import (
    Budget,
    Pool,
    Vector,
    by_role,
    num_ready_left,
    unit_of,
)
from pdcluster_api.plan.autoscale.values import DecisionTrace
from pdcluster_api.plan.observed.state import Problem
from pdcluster_schema import conditions
from pdcluster_schema.autoscale import AutoscaleSpec, ScheduleSpec
from pdcluster_schema.sections import PoolSpec
from pdcluster_schema.values import MAX_REPLICAS
from pdcluster_schema.workload import PoolKey


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
        lost = max(0, waiting - released) + _num_refused(pool) + facts.lost
        is_open = facts.fault is None and facts.gpu not in backoff
        found.append(replace(pool, is_open=is_open, short=waiting, released=released, lost=lost))
    return found


def _num_waiting(pool: Pool, spec: AutoscaleSpec) -> int:
    facts = pool.facts
    return facts.unschedulable if facts.unschedulable_seconds >= spec.capacity_seconds else 0


def _num_refused(pool: Pool) -> int:
    facts = pool.facts
    return 0 if facts.fault is None else max(0, facts.num_requested - facts.current)


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
        sizes = sorted({pool.facts.gpus_per_replica for pool in pools if pool.facts.gpu == gpu})
        each = "" if sizes in ([], [1]) else f" of {' or '.join(map(str, sizes))} accelerators"
        message = (
            f"{gpu} is short of {workers}{each} that no node takes; nothing more is asked of it "
            "while a pod waits, nor for backoffSeconds after that"
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
    """(min, max, source) of a pool at a time."""
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
    since = minute if start <= minute else minute + _DAY_MINUTES
    day = local if start <= minute else local - timedelta(days=1)
    is_its_day = not schedule.days or _DAYS[day.weekday()] in schedule.days
    return since < start + length and is_its_day


def _minute(text: str) -> int:
    hours, minutes = text.split(":")
    return int(hours) * 60 + int(minutes)


@cache
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


def trim(excess: int, limit: str, pools: Sequence[Pool], vector: Vector) -> dict[PoolKey, int]:
    """The vector with at least `excess` less in a limit, or as much as its pools may give."""
    among, unit = [pool for pool in pools if limit in pool.limits], unit_of(limit)
    left, roles = dict(vector), by_role(pools)
    workers = {role: sum(left[pool.key] for pool in mine) for role, mine in roles.items()}
    ready = {role: num_ready_left(mine, left) for role, mine in roles.items()}
    donors = [(_rank(pool, left[pool.key]), number) for number, pool in enumerate(among)]
    heapify(donors)
    given: list[Pool] = []
    while excess > 0 and donors:
        _, number = donors[0]
        pool = among[number]
        size, role = left[pool.key], pool.role
        loses_ready = pool.loses_ready(size)
        if not size or workers[role] <= 1 or (loses_ready and ready[role] == 1):
            heappop(donors)  # nor will it give later: what its role has only becomes less
            continue
        left[pool.key] -= 1
        given.append(pool)
        workers[role] -= 1
        ready[role] -= loses_ready
        excess -= pool.one[unit]
        heapreplace(donors, (_rank(pool, size - 1), number))
    for pool in reversed(given):
        if (amount := pool.one[unit]) <= -excess:
            left[pool.key] += 1
            excess += amount
    return left


def _rank(pool: Pool, size: int) -> tuple[float, ...]:
    above = size - pool.low
    return above <= 0, pool.loses_ready(size), -above, -size, -pool.price, -pool.order


def base_of(pools: Sequence[Pool], budget: Budget, trace: DecisionTrace) -> tuple[Vector, Budget]:
    """The sizes, and the budget less the room that a raised minReplicas waits for."""
    bounded = {pool.key: pool.clamp(pool.size) for pool in pools}
    for pool in pools:
        trace.step(rules.BOUNDS, pool.name, (pool.size, bounded[pool.key]), pool.bounds_text())
    raised = _within(budget, pools, bounded)
    base = _within_budget(budget, pools, raised)
    usage = budget.over(pools, bounded) or budget.used(pools, base)
    for pool in pools:
        before, after = bounded[pool.key], base[pool.key]
        rule, why = rules.BUDGET, f"it waits for room: {usage}"
        if after > before:
            rule = rules.NEVER_ALONE
            why = "no other worker of the role is ready: it waits until another is ready"
        elif after < pool.size:
            why = f"the budget is exceeded ({usage})"
        trace.step(rule, pool.name, (before, after), why)
    trace.problems += _problems(budget, pools, base)
    return base, budget.keeping(pools, raised, base)


def _within(budget: Budget, pools: Sequence[Pool], bounded: Vector) -> dict[PoolKey, int]:
    vector = dict(bounded)
    # All together last: what a type forbids takes no room there.
    for gpu, limit in sorted(budget.limits.items(), reverse=True):
        excess = budget.requested(pools, vector)[gpu] - limit
        vector = trim(excess, gpu, pools, vector)
    for mine in by_role(pools).values():
        last = max(mine, key=lambda pool: (pool.facts.ready, -pool.price, -pool.order))
        if last.facts.ready and not num_ready_left(mine, vector):
            vector[last.key] = last.ready_top - last.facts.ready + 1
    return vector


def _within_budget(budget: Budget, pools: Sequence[Pool], raised: Vector) -> dict[PoolKey, int]:
    """The sizes as far as what is raised has room; a role keeps one worker until then."""
    now = {pool.key: pool.size for pool in pools}
    allocation = Allocation(pools, now, budget)
    falling = [pool for pool in pools if raised[pool.key] <= pool.size]
    rising = [pool for pool in pools if raised[pool.key] > pool.size]
    for pool in (*falling, *reversed(rising)):
        allocation.move_to(pool, raised[pool.key])
    vector = allocation.sizes
    for mine in by_role(pools).values():
        last = max(mine, key=lambda pool: pool.size)
        if last.size and not any(vector[pool.key] for pool in mine):
            vector[last.key] = 1  # until the one that is to take its place has room
    return vector


def _problems(budget: Budget, pools: Sequence[Pool], vector: Vector) -> list[Problem]:
    over = budget.over(pools, vector)
    if over is not None:
        workers = (sum(vector[pool.key] for pool in mine) for mine in by_role(pools).values())
        why = (
            "one worker of each role is more than"
            if all(number <= 1 for number in workers)
            else "the last ready worker of a role waits until another is ready, over"
        )
        message = f"{why} the budget ({over}): raise autoscale.budget"
        return [Problem(conditions.BUDGET_TOO_SMALL, message)]
    short = [
        f"{pool.name} has {vector[pool.key]} of minReplicas {pool.low}"
        for pool in pools
        if vector[pool.key] < pool.low
    ]
    if short:
        message = f"{', '.join(short)}: raise autoscale.budget or lower minReplicas"
        return [Problem(conditions.BUDGET_TOO_SMALL, message)]
    return []
