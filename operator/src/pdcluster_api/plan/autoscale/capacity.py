"""The edge of capacity: pods that no node takes, and pods that cannot be created.

A pod that has waited longer than `capacitySeconds` says that its GPU type has no
room: nothing more is asked of that type, by either role, for `backoffSeconds`.
The highest ordinals among such pods are given back, since a StatefulSet removes
those first.  A waiting pod in the middle only counts as capacity that is lost:
its neighbours above are healthy and stay.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.pools import Pool
from pdcluster_api.plan.observed.decision import Step
from pdcluster_api.plan.observed.problem import Problem
from pdcluster_api.schema import conditions
from pdcluster_api.schema.autoscale import AutoscaleSpec
from pdcluster_api.schema.workload import PoolKey


@dataclass(frozen=True)
class Edge:
    """Sizes and pools as far as capacity allows.

    pools:   as they were given, those closed that may not grow
    sizes:   replicas by pool, without what is given back
    lost:    workers by role that are asked for and will not come
    short:   workers by GPU type that no node takes
    backoff: until when each GPU type is left alone
    """

    pools: Sequence[Pool]
    sizes: Mapping[PoolKey, int]
    lost: Mapping[str, int]
    short: Mapping[str, int]
    backoff: Mapping[str, float]
    steps: Sequence[Step] = ()


def find_edge(pools: Sequence[Pool], spec: AutoscaleSpec, backoff: Mapping[str, float], now: float) -> Edge:
    """Find pods that wait for capacity, and give back those that can be.

    At least one worker of a role stays asked for.
    """
    waiting = {pool.key: _num_waiting(pool, spec) for pool in pools}
    until = {gpu: at for gpu, at in backoff.items() if now < at <= now + spec.backoff_seconds}
    until.update({pool.facts.gpu: now + spec.backoff_seconds for pool in pools if waiting[pool.key]})
    sizes = _without_tops(pools, waiting)
    lost: Counter[str] = Counter()
    short: Counter[str] = Counter()
    for pool in pools:
        given = pool.facts.replicas - sizes[pool.key]
        lost[pool.facts.role] += max(0, waiting[pool.key] - given) + _num_refused(pool)
        short[pool.facts.gpu] += waiting[pool.key]
    closed = [replace(pool, is_open=pool.facts.fault is None and pool.facts.gpu not in until) for pool in pools]
    steps = [_given_back(pool, sizes[pool.key]) for pool in pools if sizes[pool.key] != pool.facts.replicas]
    return Edge(closed, sizes, lost, +short, until, steps)


def _num_waiting(pool: Pool, spec: AutoscaleSpec) -> int:
    return pool.facts.unschedulable if pool.facts.unschedulable_seconds >= spec.capacity_seconds else 0


def _num_refused(pool: Pool) -> int:
    return 0 if pool.facts.fault is None else max(0, pool.facts.replicas - pool.facts.current)


def _without_tops(pools: Sequence[Pool], waiting: Mapping[PoolKey, int]) -> dict[PoolKey, int]:
    sizes = {pool.key: pool.facts.replicas for pool in pools}
    of_role = Counter[str]()
    for pool in pools:
        of_role[pool.facts.role] += pool.facts.replicas
    for pool in pools:
        role = pool.facts.role
        tops = min(pool.facts.unschedulable_top, waiting[pool.key], pool.facts.replicas)
        given = max(0, min(tops, pool.facts.replicas - pool.low, of_role[role] - 1))
        sizes[pool.key] -= given
        of_role[role] -= given
    return sizes


def _given_back(pool: Pool, size: int) -> Step:
    facts = pool.facts
    why = f"{facts.unschedulable} pods have found no node for {facts.unschedulable_seconds:.0f} s: {facts.gpu} has no room"
    return Step(rules.CAPACITY, pool.name, facts.replicas, size, why)


def capacity_problems(edge: Edge, missing: Mapping[str, int]) -> Iterable[Problem]:
    """CapacityShort for every GPU type with waiting pods, or in back-off while its workers are
    missing.

    missing: workers by role that are needed and that no open pool takes
    """
    short = Counter(edge.short)
    for gpu in edge.backoff:
        roles = {pool.facts.role for pool in edge.pools if pool.facts.gpu == gpu}
        short[gpu] = max(short[gpu], sum(missing.get(role, 0) for role in roles))
    for gpu, number in sorted((+short).items()):
        workers = "1 worker" if number == 1 else f"{number} workers"
        message = (
            f"{gpu} is short of {workers} that no node takes; nothing more is asked of it while a pod waits, "
            "nor for backoffSeconds after that"
        )
        yield Problem(conditions.CAPACITY_SHORT, message)
    for pool in edge.pools:
        if pool.facts.fault is not None and (missing.get(pool.facts.role) or _num_refused(pool)):
            yield Problem(conditions.CAPACITY_SHORT, f"{pool.facts.gpu}: pods of {pool.name} cannot be created: {pool.facts.fault}")
