"""Decide for both roles of a cluster: facts, numbers and a clock in, replicas and reasons out.

Pure, and the same in every mode, except that advice does not follow each fall of
the load: whether a decision is carried out or only shown is not known here.  The
rules act in the order of `rules.RULES`.  A value that is not known holds: a role
without numbers keeps its size.  A cluster that asks for nothing at all stays so,
and as long as it asks for anything each role has a worker.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.bounds import bounds_of, conflict
from pdcluster_api.plan.autoscale.budget import Budget, trimmed
from pdcluster_api.plan.autoscale.capacity import Edge, capacity_problems, find_edge
from pdcluster_api.plan.autoscale.fit import Fitted, fit
from pdcluster_api.plan.autoscale.need import RoleTotals, signals_of
from pdcluster_api.plan.autoscale.pools import Pool, Vector, num_ready_left
from pdcluster_api.plan.autoscale.ratio import measured_weights, table_weight
from pdcluster_api.plan.autoscale.safety import Recommendation, RoleSignals, RoleSize, recommend
from pdcluster_api.plan.autoscale.signals import Freshness, Totals, read_pools, together
from pdcluster_api.plan.autoscale.stabilization import is_same, stabilize, stabilize_advice
from pdcluster_api.plan.autoscale.values import Clock, Memory, Outcome, PoolFacts, Windows
from pdcluster_api.plan.observed.decision import Decision, Input, Step
from pdcluster_api.plan.observed.problem import Problem
from pdcluster_api.schema import conditions
from pdcluster_api.schema.pdcluster import PDClusterSpec
from pdcluster_api.schema.workload import PoolKey


@dataclass
class _Log:
    """Inputs, steps and problems of one decision, in the order in which they come about."""

    inputs: list[Input]
    steps: list[Step]
    problems: list[Problem]


@dataclass(frozen=True)
class _Asked:
    """Recommendations before the roles are brought together.

    recommendations: workers by role; memory: for the next decision
    """

    recommendations: Mapping[str, int]
    memory: Memory


def decide(spec: PDClusterSpec, facts: Sequence[PoolFacts], windows: Windows, memory: Memory, clock: Clock) -> Outcome:
    """Decide on the replicas of every declared pool.

    A declared pool without facts counts as one with its `replicas` and no pod yet;
    facts of a pool that is not declared count against the budget until its pods are gone.
    """
    log = _Log([], [], [])
    fresh = Freshness(clock.now, (spec.autoscale.stale_after + 1) * spec.autoscale.interval_seconds)
    totals = read_pools(facts, windows, fresh)
    pools = _pools(spec, facts, totals, clock, log)
    edge = find_edge(pools, spec.autoscale, memory.backoff, clock.now)
    log.steps += edge.steps
    declared = {pool.key for pool in pools}
    budget = Budget.of(spec.autoscale.budget, [each for each in facts if each.key not in declared], pools)
    base, budget = _base(edge, budget, log)
    asked = _ask(spec, edge, base, (totals, memory, clock.now), log)
    fitted = fit(edge.pools, base, asked.recommendations, budget, spec.autoscale.ratio)
    log.steps += fitted.steps
    log.problems += [*fitted.problems, *capacity_problems(edge, fitted.missing)]
    log.steps += _pool_steps(edge.pools, base, fitted)
    return _outcome(pools, fitted.vector, asked.memory, log)


def _outcome(pools: Sequence[Pool], vector: Vector, memory: Memory, log: _Log) -> Outcome:
    replicas = {pool.key: vector[pool.key] for pool in pools}
    changed = any(replicas[pool.key] != pool.facts.replicas for pool in pools)
    return Outcome(Decision(replicas, tuple(log.inputs), tuple(log.steps)), memory, tuple(log.problems), changed)


def _pools(spec: PDClusterSpec, facts: Iterable[PoolFacts], totals: Mapping[PoolKey, Totals], clock: Clock, log: _Log) -> Sequence[Pool]:
    known = {each.key: each for each in facts}
    found: list[Pool] = []
    for role, declared in spec.roles.computing().items():
        for order, each in enumerate(declared.pools):
            low, high, source = bounds_of(role, each, spec.autoscale.schedules, clock.wall)
            facts_of = known.get((role, each.name)) or PoolFacts(role, each.name, each.gpu, each.replicas, 0, 0)
            price = spec.autoscale.cost.get(each.gpu, 1.0)
            found.append(Pool(facts_of, order, price, low=min(low, high), high=high, source=source))
            problem = conflict(f"{role}/{each.name}", low, high)
            log.problems += [] if problem is None else [problem]
    return [pool for role in spec.roles.computing() for pool in _weighed(role, found, totals, spec.autoscale.tolerance)]


def _weighed(role: str, pools: Iterable[Pool], totals: Mapping[PoolKey, Totals], tolerance: float) -> list[Pool]:
    mine = [pool for pool in pools if pool.facts.role == role]
    weights = [table_weight(role, pool.facts.gpu) for pool in mine]
    if role == "prefill":
        weights = measured_weights(weights, [totals.get(pool.key, Totals()).prefill_speed for pool in mine], tolerance)
    return [replace(pool, weight=weight) for pool, weight in zip(mine, weights, strict=True)]


def _base(edge: Edge, budget: Budget, log: _Log) -> tuple[Vector, Budget]:
    """Start of a decision: sizes within min, max and the budget, and the budget that is left."""
    bounded = {pool.key: pool.clamp(edge.sizes[pool.key]) for pool in edge.pools}
    for pool in edge.pools:
        before, after = edge.sizes[pool.key], bounded[pool.key]
        if before != after:
            log.steps.append(Step(rules.BOUNDS, pool.name, before, after, pool.bounds_said()))
    found = trimmed(budget, edge.pools, bounded, edge.sizes)
    log.steps += found.steps
    log.problems += [] if found.problem is None else [found.problem]
    return found.vector, found.budget


def _ask(spec: PDClusterSpec, edge: Edge, base: Vector, seen: tuple[Mapping[PoolKey, Totals], Memory, float], log: _Log) -> _Asked:
    """Recommend a size per role, as far as its windows allow.

    seen: totals of pools, memory, now.
    """
    totals, memory, now = seen
    roles = list(spec.roles.computing())
    of_role = {role: together(totals.get(pool.key, Totals()) for pool in edge.pools if pool.facts.role == role) for role in roles}
    is_asleep = not any(base.values())
    recommendations: dict[str, int] = {}
    remembered, sizes, advised = {}, {}, {}
    for role in roles:
        size = _size(role, edge, base)
        role_totals = RoleTotals(of_role[role], of_role[spec.decode_role])
        recommended = Recommendation(size.asked) if is_asleep else _recommend(spec, size, role_totals, log)
        before = memory if is_same(memory, role, size.asked, spec.autoscale, now) else Memory()
        if spec.autoscale.mode == "Advise":
            window, past = spec.autoscale.scale_down.window_seconds, before.advised.get(role, ())
            steady = stabilize_advice(role, size.asked, recommended.workers, window, past=past, now=now)
            log.steps += steady.steps
            recommended, advised[role] = replace(recommended, workers=steady.workers), steady.recommendations
        past = before.recommendations.get(role, ())
        allowed = stabilize(role, size.asked, recommended.workers, spec.autoscale, past=past, now=now, goes_on=recommended.goes_on)
        log.steps += allowed.steps
        recommendations[role], remembered[role], sizes[role] = allowed.workers, allowed.recommendations, size.asked
        if not is_asleep and recommendations[role] < 1:
            log.steps.append(Step(rules.NEVER_ALONE, role, recommendations[role], 1, "no role serves without the other"))
            recommendations[role] = 1
    return _Asked(recommendations, Memory(remembered, sizes, edge.backoff, now, advised))


def _size(role: str, edge: Edge, base: Vector) -> RoleSize:
    mine = [pool for pool in edge.pools if pool.facts.role == role]
    tops = (min(pool.facts.unschedulable_top, base[pool.key] - pool.low) - _given(pool, edge) for pool in mine)
    asked, ready = sum(base[pool.key] for pool in mine), num_ready_left(mine, base)
    return RoleSize(role, asked, ready, sum(max(0, top) for top in tops), edge.lost.get(role, 0))


def _given(pool: Pool, edge: Edge) -> int:
    return pool.facts.replicas - edge.sizes[pool.key]


def _recommend(spec: PDClusterSpec, size: RoleSize, totals: RoleTotals, log: _Log) -> Recommendation:
    signals = signals_of(size.role, totals, spec.autoscale)
    log.inputs += [signal.input(size.role) for signal in signals]
    if signals:
        numbers = {"ready_workers": totals.workers, "settled_workers": totals.own.settled}
        log.inputs += [Input(size.role, name, float(number)) for name, number in numbers.items()]
    headroom = spec.autoscale.prefill.headroom if size.role == "prefill" else 0.0
    role_totals = RoleSignals(signals, totals.workers, totals.own.missing, totals.missing)
    recommended = recommend(size, role_totals, headroom=headroom, tolerance=spec.autoscale.tolerance)
    if totals.own.failing:
        message = (
            f"{size.role}: {totals.own.failing} of {totals.workers} ready workers give no numbers that can be used; look at their /metrics"
        )
        log.problems.append(Problem(conditions.METRICS_MISSING, message))
    log.steps += recommended.steps
    return recommended


def _pool_steps(pools: Sequence[Pool], base: Vector, fitted: Fitted) -> Iterable[Step]:
    for pool in pools:
        before, after = base[pool.key], fitted.vector[pool.key]
        if before != after:
            yield Step(rules.POOL, pool.name, before, after, _choice(pool, before, after))


def _choice(pool: Pool, before: int, after: int) -> str:
    price = f"{pool.facts.gpu} at a price of {pool.price:g}"
    if after > before:
        return f"the cheapest pool that has capacity: {price}"
    if pool.facts.unschedulable_top:
        return f"{pool.facts.unschedulable_top} of its pods have no node: {price}"
    return f"the dearest pool that can give: {price}"
