"""Decide for both roles of a cluster: facts, numbers and a clock in, replicas and reasons out.
Pure. A role without numbers keeps its size.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.allocate import fit
from pdcluster_api.plan.autoscale.base import (
    backoff_until,
    base_of,
    bounds_of,
    capacity_problems,
    conflict,
    probe_capacity,
)
from pdcluster_api.plan.autoscale.flip import FlipPlan, Needs, plan_flips
from pdcluster_api.plan.autoscale.latency import Correction, MeasuredLatency, learned
from pdcluster_api.plan.autoscale.objectives import latencies_of
from pdcluster_api.plan.autoscale.pools import (
    Budget,
    Pool,
    Vector,
    flexible_pair,
    measured_weights,
    num_ready_left,
    relative_price,
    worker_weight,
)
from pdcluster_api.plan.autoscale.safety import (
    Recommendation,
    RoleState,
    busy_workers,
    is_same,
    is_short_of_blocks,
    recommend,
    stabilize,
    stabilize_advice,
)
from pdcluster_api.plan.autoscale.signals import signals_of
from pdcluster_api.plan.autoscale.sleep import rest_of, rested, sizes_by_role, woken
from pdcluster_api.plan.autoscale.totals import Totals, fresh_rounds, read_pool, together
from pdcluster_api.plan.autoscale.values import (
    Clock,
    DecisionTrace,
    Memory,
    Outcome,
    PoolFacts,
    Windows,
)
from pdcluster_api.plan.observed.state import DecisionInput, Problem, ScalingDecision
from pdcluster_schema import conditions
from pdcluster_schema.accelerators import accelerators_text
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.workload import PoolKey


def decide(
    spec: PDClusterSpec,
    facts: Sequence[PoolFacts],
    windows: Windows,
    memory: Memory,
    clock: Clock,
) -> Outcome:
    """Decide on the replicas of every declared pool.  A declared pool without facts counts as one
    with its `replicas` and no pod yet; facts of a pool that is not declared count against the
    budget until its pods are gone.
    """
    # 1. Read the scraped rounds of each pool: load, speed and what is stale.
    # 2. Take the declared pools with their bounds.
    # 3. Release workers whose pods find no accelerator, and leave that GPU type alone for a while.
    # 4. Begin from the base: sizes within bounds and budget, whatever the load is.
    # 5. Recommend workers for each role by its signals, held back by the safety rules; the first
    #    ones of a cluster that sleeps while routers hold a request.
    # 6. Allocate them to pools one at a time, both roles together, by budget, price and ratio.
    # 7. Let all sleep where no request has come for long.
    # 8. Let a worker of a flexible pool change its role where that helps and nothing else can.
    # 9. Return replicas with every step's reason, and the memory of the next decision.
    trace = DecisionTrace()
    totals = _totals(spec.autoscale, facts, windows, clock.now)
    pools = _pools(spec, facts, totals, clock, trace)
    backoff = backoff_until(pools, spec.autoscale, memory.backoff, clock.now)
    pools = probe_capacity(pools, spec.autoscale, backoff, trace)
    declared = {pool.key for pool in pools}
    undeclared = [each for each in facts if each.key not in declared]
    base, budget = base_of(pools, Budget.of(spec.autoscale.budget, undeclared, pools), trace)
    flips, of_roles = memory.flips, sizes_by_role(pools, base)
    rest = rest_of(spec, facts, of_roles, (windows, memory, clock.now), trace)
    needs, memory = _recommendations(spec, pools, base, (totals, windows, memory, clock.now), trace)
    needs = replace(needs, allowed=woken(rest, needs.allowed, trace))
    memory = replace(memory, backoff=backoff, idle_since=rest.since)
    ratio = spec.autoscale.ratio
    fitted, missing = fit(pools, base, needs.allowed, budget, ratio, trace=trace)
    known = memory, needs.allowed, clock.now
    sizes = rested(rest, spec, pools, (base, fitted), known, trace=trace)
    trace.problems += capacity_problems(pools, backoff, missing)
    for pool in pools:
        before, after = base[pool.key], sizes[pool.key]
        trace.step(rules.POOL, pool.name, (before, after), _choice(pool, before, after))
    replicas, flipped = {pool.key: sizes[pool.key] for pool in pools}, None
    pair = flexible_pair(spec)
    if pair is not None and spec.autoscale.mode == "On" and any(sizes.values()):
        plan = FlipPlan.of(pair, pools, base, replicas)
        flips = plan_flips(plan, needs, spec, memory=flips, now=clock.now, trace=trace)
        memory = replace(memory, flips=flips)
        replicas, flipped = plan.replicas(), plan.flipped
    changed = any(replicas[pool.key] != pool.facts.num_requested for pool in pools)
    changed |= any(
        pool.facts.num_away != (flipped.away(pool.key) if flipped else 0) for pool in pools
    )
    trace_of = tuple(trace.inputs), tuple(trace.steps), tuple(trace.problems)
    decision = ScalingDecision(replicas, *trace_of, at=clock.wall, flipped=flipped)
    return Outcome(decision, memory, changed)


def _totals(
    spec: AutoscaleSpec, facts: Iterable[PoolFacts], windows: Windows, now: float
) -> dict[PoolKey, Totals]:
    found = ((each, windows.get(each.key, ())) for each in facts)
    return {
        each.key: read_pool(each, window, fresh_rounds(window, now, spec.fresh_seconds))
        for each, window in found
    }


def _pools(
    spec: PDClusterSpec,
    facts: Iterable[PoolFacts],
    totals: Mapping[PoolKey, Totals],
    clock: Clock,
    trace: DecisionTrace,
) -> list[Pool]:
    known = {each.key: each for each in facts}
    found: list[Pool] = []
    for role, declared in spec.roles.computing().items():
        for order, each in enumerate(declared.pools):
            low, high, source = bounds_of(role, each, spec.autoscale.schedules, clock.wall)
            gpus = spec.gpus_per_replica(role, each)
            new = PoolFacts(role, each.name, each.gpu, each.replicas, 0, 0, gpus_per_replica=gpus)
            pool = Pool(
                known.get((role, each.name)) or new,
                order,
                price=relative_price(spec, each.gpu),
                weight=worker_weight(spec, role, each),
                low=min(low, high),
                high=high,
                source=source,
            )
            found.append(pool)
            if (problem := conflict(pool.name, low, high)) is not None:
                trace.problems.append(problem)
    return [
        pool
        for role in spec.roles.computing()
        for pool in _weighed(role, found, totals, spec.autoscale.tolerance)
    ]


def _weighed(
    role: str, pools: Iterable[Pool], totals: Mapping[PoolKey, Totals], tolerance: float
) -> list[Pool]:
    mine = [pool for pool in pools if pool.role == role]
    weights = [pool.weight for pool in mine]
    if role == "prefill":
        speeds = [totals.get(pool.key, Totals()).prefill_speed for pool in mine]
        weights = measured_weights(weights, speeds, tolerance)
    return [replace(pool, weight=weight) for pool, weight in zip(mine, weights, strict=True)]


def _recommendations(
    spec: PDClusterSpec,
    pools: Sequence[Pool],
    base: Vector,
    seen: tuple[Mapping[PoolKey, Totals], Windows, Memory, float],
    trace: DecisionTrace,
) -> tuple[Needs, Memory]:
    totals, windows, memory, now = seen
    of_role = {
        role: together(totals.get(pool.key, Totals()) for pool in pools if pool.role == role)
        for role in spec.roles.computing()
    }
    is_asleep = not any(base.values())
    recommendations: dict[str, int] = {}
    needed: dict[str, int] = {}
    roles: dict[str, RoleState] = {}
    remembered, sizes, advised = {}, {}, {}
    corrections = dict(memory.corrections)
    for name, own in of_role.items():
        latencies = _latencies(spec, name, (own, windows, now), corrections)
        role = _role(spec, name, pools, base, (own, of_role[spec.decode_role], latencies))
        requested = sizes[name] = role.requested
        recommended = Recommendation(requested)
        if not is_asleep:
            recommended = _recommend(spec, role, own, trace)
        workers = needed[name] = recommended.workers
        roles[name] = role
        same = is_same(memory, name, requested, spec.autoscale, now)
        before = memory if same else Memory()
        if spec.autoscale.mode == "Advise":
            window, past = spec.autoscale.scale_down.window_seconds, before.advised.get(name, ())
            workers, advised[name] = stabilize_advice(
                name, requested, workers, window, past=past, now=now, trace=trace
            )
        workers, remembered[name] = stabilize(
            name,
            requested,
            workers,
            spec.autoscale,
            past=before.recommendations.get(name, ()),
            now=now,
            trace=trace,
            goes_on=recommended.goes_on,
        )
        recommendations[name] = max(workers, 0 if is_asleep else 1)
        why = "no role serves without the other"
        trace.step(rules.NEVER_ALONE, name, (workers, recommendations[name]), why)
    memory = Memory(remembered, sizes, at=now, advised=advised, corrections=corrections)
    if "prefill" in roles and is_short_of_blocks(roles["decode"]):
        needed["prefill"] = min(needed["prefill"], busy_workers(roles["prefill"]))
    return Needs(recommendations, needed), memory


def _latencies(
    spec: PDClusterSpec,
    role: str,
    seen: tuple[Totals, Windows, float],
    corrections: dict[tuple[str, str], Correction],
) -> list[MeasuredLatency]:
    """Latencies of a role, corrected by what is learned of them: `corrections` are brought up to
    date.
    """
    own, windows, now = seen
    of_roles = [
        [rounds for (each, _), rounds in windows.items() if each == name]
        for name in (role, spec.decode_role)
    ]
    fresh = now - spec.autoscale.fresh_seconds
    found = []
    for latency in latencies_of(role, spec.autoscale, (of_roles[0], of_roles[1]), own, fresh):
        key = role, latency.kind
        past = learned(corrections.pop(key, None), latency, own.workers, own.settled)
        if past is not None:
            corrections[key] = past
        found.append(latency if past is None else replace(latency, factor=past.factor))
    return found


def _role(
    spec: PDClusterSpec,
    name: str,
    pools: Sequence[Pool],
    base: Vector,
    seen: tuple[Totals, Totals, Sequence[MeasuredLatency]],
) -> RoleState:
    """seen: totals of the role, and of the one that answers HTTP; latencies of the role"""
    own, ingress, latencies = seen
    mine = [pool for pool in pools if pool.role == name]
    tops = (
        min(pool.facts.unschedulable_top, base[pool.key] - pool.low) - pool.released
        for pool in mine
    )
    return RoleState(
        name,
        requested=sum(base[pool.key] for pool in mine),
        ready=num_ready_left(mine, base),
        top=sum(max(0, top) for top in tops),
        lost=sum(pool.lost for pool in mine),
        signals=signals_of(name, own, ingress, spec.autoscale, latencies),
        workers=own.workers,
        silent=own.missing,
        missing=own.missing + (0 if ingress is own else ingress.missing),
        headroom=spec.autoscale.prefill.headroom if name == "prefill" else 0.0,
    )


def _recommend(
    spec: PDClusterSpec, role: RoleState, own: Totals, trace: DecisionTrace
) -> Recommendation:
    for signal in role.signals:
        trace.inputs.append(signal.input(role.name))
        if signal.latency is not None:
            trace.inputs += signal.latency.inputs(role.name)
    if role.signals:
        numbers = {"ready_workers": own.workers, "settled_workers": own.settled}
        trace.inputs += [
            DecisionInput(role.name, name, float(number)) for name, number in numbers.items()
        ]
    recommended = recommend(role, spec.autoscale.tolerance)
    if own.failing:
        message = (
            f"{role.name}: {own.failing} of {own.workers} ready workers give no numbers that can "
            "be used; look at their /metrics"
        )
        trace.problems.append(Problem(conditions.METRICS_MISSING, message))
    trace.steps += recommended.steps
    return recommended


def _choice(pool: Pool, before: int, after: int) -> str:
    number = pool.facts.gpus_per_replica
    each = "" if number == 1 else " each"
    price = f"{accelerators_text(pool.facts.gpu, number)} at a price of {pool.price:g}{each}"
    if after > before:
        return f"the cheapest pool that has capacity: {price}"
    if pool.facts.unschedulable_top:
        return f"{pool.facts.unschedulable_top} of its pods have no node: {price}"
    return f"the dearest pool that can give: {price}"
