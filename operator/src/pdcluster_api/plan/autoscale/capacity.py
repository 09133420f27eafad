"""The edge of capacity: pods that no node takes, and pods that cannot be created.

A pod that has waited longer than `capacitySeconds` says that its GPU type has no
room: nothing more is asked of that type, by either role, for `backoffSeconds`.
The highest ordinals among such pods are given back, since a StatefulSet removes
those first.  A waiting pod in the middle only counts as capacity that is lost:
its neighbours above are healthy and stay.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.pools import Pool
from pdcluster_api.plan.autoscale.trace import DecisionTrace
from pdcluster_api.plan.observed.problem import Problem
from pdcluster_schema import conditions
from pdcluster_schema.autoscale import AutoscaleSpec


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
    grow.

    At least one worker of a role stays asked for.
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
    """Accelerators of a type's workers, as text; empty where each has one."""
    numbers = sorted({pool.facts.gpus_per_replica for pool in pools if pool.facts.gpu == gpu})
    return "" if numbers in ([], [1]) else f" of {' or '.join(map(str, numbers))} accelerators"


def capacity_problems(
    pools: Sequence[Pool], backoff: Mapping[str, float], missing: Mapping[str, int]
) -> Iterator[Problem]:
    """CapacityShort for every GPU type with waiting pods, or in back-off while its workers are
    missing.

    missing: workers by role that are needed and that no open pool takes
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
