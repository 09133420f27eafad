"""The plan of one cluster: what should run; all else is to be removed. Pure; planning again on what
a plan led to gives the same plan.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from pdcluster_api.plan.autoscale.pools import flexible_pair
from pdcluster_api.plan.drain.disruption import ReadinessDeadline, plan_budgets
from pdcluster_api.plan.drain.draining import DrainPlan, plan_drain
from pdcluster_api.plan.flips import FlipState, commanded_roles, is_flipping
from pdcluster_api.plan.history import History, kept_snapshots, next_history, read_history
from pdcluster_api.plan.inputs import PlanInputs, plan_inputs
from pdcluster_api.plan.observed.pools import ingress_of
from pdcluster_api.plan.observed.state import Observed, Previous
from pdcluster_api.plan.result import ClusterPlan
from pdcluster_api.plan.rolling.planned import RollingPlan, rolling_plan
from pdcluster_api.plan.rollout import RolloutStep, next_step
from pdcluster_api.plan.sizes import PoolSize, RequestedSizes, plan_scaler
from pdcluster_api.plan.status.autoscaled import ON, is_new, rollout_held, rollout_over_budget
from pdcluster_api.plan.status.condition import Condition
from pdcluster_api.plan.status.discovery import InSync, in_sync
from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.sections import ENGINELESS, ROUTER
from pdcluster_schema.workload import Workload, WorkloadId


@dataclass(frozen=True)
class DesiredState:
    inputs: PlanInputs
    step: RolloutStep
    rolling: RollingPlan | None  # old workers are replaced step by step
    kept: tuple[Workload, ...]  # older workloads that stay
    leaving: tuple[Workload, ...]  # pools that are no longer declared and still answer
    drain: DrainPlan  # all workloads, at the sizes that they may have now
    registered: InSync
    over_budget: Condition | None
    now: str  # RFC 3339 in UTC

    @property
    def serving_role(self) -> str:
        inputs, step = self.inputs, self.step
        decode_role: str = inputs.cluster.spec.decode_role
        if step.is_wide:
            return decode_role
        if step.serving != inputs.target:
            decode_role = inputs.existing.decoding_role(step.serving) or decode_role
        return decode_role if _leads_on(inputs, step.serving, decode_role) else self._ingress_role

    @property
    def _ingress_role(self) -> str:
        """The role that answers in the revision; of routers it takes one that is asked for."""
        inputs, step, spec = self.inputs, self.step, self.inputs.cluster.spec
        if step.serving == inputs.target:
            has_routers = any(size.desired for size in inputs.sizes if size.role == ROUTER)
            return ROUTER if has_routers else spec.decode_role
        kept = ingress_of(
            workload.role
            for workload in step.kept
            if workload.role != ROUTER or inputs.size_before(workload)
        )
        return kept or inputs.existing.ingress_role(step.serving) or spec.ingress_role

    @property
    def is_flipping(self) -> bool:
        """True while a worker has yet to take, or give back, the other role."""
        inputs, pair = self.inputs, flexible_pair(self.inputs.cluster.spec)
        records = inputs.observed.worker_records
        if records is None or records.error is not None:
            return False
        commanded = commanded_roles(inputs.flips, inputs.observed.workloads)
        return commanded != records.roles or (
            pair is not None and is_flipping(inputs.flips, pair, inputs.observed)
        )

    @cached_property
    def history(self) -> History:
        """With the declared revision as the last one, once all its workers are ready, serve, and
        have passed their gates.
        """
        inputs, step = self.inputs, self.step
        before = read_history(inputs.observed.status)
        is_reached = step.is_wide or step.serving == inputs.target
        is_open = inputs.gate is not None and inputs.gate.is_open
        has_workers = any(size.desired for size in inputs.sizes if size.role not in ENGINELESS)
        if not (inputs.is_target_ready and is_reached and has_workers) or is_open:
            return before
        return next_history(before, inputs.declared, self.now)

    @property
    def retired(self) -> Iterator[WorkloadId]:
        """Earlier workloads of which the snapshot alone stays."""
        inputs, observed = self.inputs, self.inputs.observed
        pools = {size.key for size in inputs.sizes}
        kept = kept_snapshots(self.history, (*observed.records, *observed.retired), pools)
        yield from sorted(kept - {each.id for each in self.drain.workloads})

    @property
    def serving(self) -> list[Workload]:
        """Workloads that clients reach: while the Service cannot be written, those of the revision
        that it still selects, too.
        """
        if self.step.is_wide or self.inputs.observed.service_is_wide:
            return list(self.drain.workloads)
        reached = (self.step.serving, self.inputs.observed.service_revision)
        return [workload for workload in self.drain.workloads if workload.id.revision in reached]


def desired_state(cluster: PDCluster, observed: Observed, now: str) -> DesiredState:
    inputs = plan_inputs(cluster, observed, now)
    observed = inputs.observed
    rolling = rolling_plan(inputs, now)
    step = _rolling_step(rolling) or next_step(
        inputs.strategy,
        inputs.declared,
        observed,
        is_target_ready=inputs.is_target_ready,
        lost=inputs.ending.lost,
    )
    target, kept, leaving = _workloads(inputs, step, rolling)
    over_budget = None
    if rolling is not None:
        over_budget = rollout_held(rolling.shortage)
    elif inputs.strategy != "Recreate":
        over_budget = rollout_over_budget(
            cluster.spec.autoscale,
            inputs.declared,
            (*target, *kept, *leaving),
            inputs.sizes,
            observed.workloads,
        )
    return DesiredState(
        inputs,
        step,
        rolling,
        kept,
        leaving,
        drain=_drain(inputs, (*target, *kept, *leaving), rolling),
        registered=in_sync(observed.worker_records, observed.workloads, Previous(observed.status)),
        over_budget=over_budget,
        now=now,
    )


def _rolling_step(rolling: RollingPlan | None) -> RolloutStep | None:
    if rolling is None:
        return None
    kept = tuple(each.id for each in rolling.kept)
    return RolloutStep(rolling.serving, kept, is_wide=rolling.is_wide)


def _workloads(
    inputs: PlanInputs, step: RolloutStep, rolling: RollingPlan | None
) -> tuple[tuple[Workload, ...], ...]:
    """Workloads of the declared revision, older ones that stay, and pools that go later."""
    target = tuple(target_workloads(inputs, step))
    if rolling is None:
        return target, tuple(kept_workloads(inputs, step)), leaving_pools(inputs)
    new = (replace(each, replicas=rolling.new_size(each)) for each in target)
    return tuple(new), rolling.kept, ()


def target_workloads(inputs: PlanInputs, step: RolloutStep) -> Iterator[Workload]:
    """Workloads of the declared revision; only the existing ones while an older one ends first."""
    for size in inputs.sizes:
        if step.waits_for is None or inputs.existing.of(*size.key, inputs.target):
            workload = inputs.declared.workload(inputs.cluster.metadata.name, *size.key)
            yield Workload(workload, 0 if inputs.is_given_up(workload) else size.desired)


def kept_workloads(inputs: PlanInputs, step: RolloutStep) -> Iterator[Workload]:
    """The older workloads that stay, at their pool's size; at their own size if that is more.  So
    their scaler counts as ever and edits by hand do not, while a lower `replicas` that came with a
    new revision takes no worker from the serving one. One whose pool is no longer declared keeps
    its size.
    """
    for workload in step.kept:
        yield _kept(inputs, workload)


def _kept(inputs: PlanInputs, workload: WorkloadId) -> Workload:
    desired = {size.key: size.desired for size in inputs.sizes}
    sizes = (desired.get((workload.role, workload.pool)), inputs.size_before(workload))
    return Workload(workload, max((size for size in sizes if size is not None), default=1))


def leaving_pools(inputs: PlanInputs) -> tuple[Workload, ...]:
    """Workloads of the serving revision whose pool is no longer declared, or whose role has another
    template: they answer until their role is ready.  One that answers nothing goes: it would only
    keep others from what they wait for. Not with Recreate, which removes the old pods first.
    """
    if inputs.current != inputs.target or inputs.strategy == "Recreate":
        return ()
    pools = {size.key for size in inputs.sizes}
    unready = {view.name for view in inputs.views() if not view.is_ready}
    states = [
        state
        for state in inputs.existing.of_revision(inputs.target)
        if state.ready and not state.gone and state.id.role in unready
    ]
    gone = [state.id for state in states if (state.id.role, state.id.pool) not in pools]
    left = (Workload(each, inputs.size_before(each) or 0) for each in gone)
    others = (state.id for state in states if state.id not in gone)
    replaced = (_kept(inputs, each) for each in others if not inputs.declared.has(each))
    return (*left, *replaced)


def _leads_on(inputs: PlanInputs, revision: str, decode_role: str) -> bool:
    """True if the Service led to decode or mixed workers, since there were no routers, and none is
    ready yet.
    """
    states, observed = inputs.existing.of_revision(revision), inputs.observed
    is_ready = any(state.ready for state in states if state.id.role == ROUTER and not state.gone)
    is_reached = observed.service_is_wide or observed.service_revision == revision
    return is_reached and observed.service_role == decode_role and not is_ready


def _drain(
    inputs: PlanInputs, desired: tuple[Workload, ...], rolling: RollingPlan | None
) -> DrainPlan:
    """Replicas to which workloads may shrink now; undeclared pools that serve shrink to 0 before
    they go.  Not with Recreate, and not of a replaced revision: they go as a whole, and their pods
    drain as they end. So do the workers of a revision that is given up, which no Service selects:
    etcd, which may be the cause, is not asked.
    """
    is_dropped = inputs.is_rolled_back and inputs.observed.service_revision != inputs.target
    dropped = [each for each in desired if is_dropped and each.id.revision == inputs.target]
    old = () if rolling is None else rolling.kept
    ended = {each.id for each in old if not (each.replicas or (rolling and rolling.keeps_old))}
    drained = [each for each in desired if each not in dropped and each.id not in ended]
    planned = {workload.id for workload in desired} - ended
    rollout, observed, leaving = inputs.cluster.spec.rollout, inputs.observed, []
    if inputs.current == inputs.target and inputs.strategy != "Recreate":
        states = inputs.existing.of_revision(inputs.target)
        leaving = [state for state in states if not state.gone and state.id not in planned]
    leaving += [
        state
        for state in observed.workloads
        if state.id in ended and not state.gone and state not in leaving
    ]
    timeout = rollout.drain_timeout_seconds
    drain = plan_drain(drained, leaving, observed.workloads, observed.worker_records, timeout)
    return replace(drain, workloads=(*dropped, *drain.workloads))


def plan_cluster(desired: DesiredState) -> ClusterPlan:
    inputs, step, drain = desired.inputs, desired.step, desired.drain
    observed, autoscale = inputs.observed, inputs.cluster.spec.autoscale
    over = desired.over_budget
    is_decision = autoscale.mode == ON and is_new(autoscale, observed)
    is_over = over is not None and not Previous(observed.status).is_true(over.type)
    patience = ReadinessDeadline(desired.now, inputs.deadline)
    return ClusterPlan(
        serving=step.serving,
        serving_role=desired.serving_role,
        is_wide=step.is_wide,
        workloads=drain.workloads,
        retired=tuple(desired.retired),
        scalers=tuple(
            plan_scaler(
                *(inputs.cluster.metadata.name, size, inputs.shown(size), inputs.target),
                is_replaced=size.role in inputs.replaced_roles,
                together=inputs.together(size) if desired.rolling else None,
            )
            for size in inputs.sizes
        ),
        reports_first=is_decision or is_over,
        ends_first=step.waits_for is not None,
        commands=drain.commands,
        graces=drain.graces,
        roles=commanded_roles(inputs.flips, observed.workloads),
        flipped=None if inputs.flips is None else inputs.flips.flipped,
        cut=drain.cut,
        budgets=plan_budgets(
            *(desired.serving, observed.workloads),
            # a drain of nodes waits for the successor of one that it has evicted
            drain.commands - drain.graces.keys(),
            *(observed.budgets, patience),
        ),
        stale_records=desired.registered.stale_records,
        needs_worker_records=drain.needs_worker_records or desired.is_flipping,
    )


def sizes_of(cluster: PDCluster, observed: Observed) -> tuple[PoolSize, ...]:
    return plan_inputs(cluster, observed).sizes


def requested_sizes(cluster: PDCluster, observed: Observed) -> RequestedSizes:
    """Replicas that are asked for now, as if the declared revision could not take over yet."""
    inputs = plan_inputs(cluster, observed)
    rolling = rolling_plan(inputs)
    step = _rolling_step(rolling) or next_step(
        inputs.strategy, inputs.declared, inputs.observed, is_target_ready=False
    )
    target, kept, leaving = _workloads(inputs, step, rolling)
    workloads = (*target, *kept, *leaving)
    given_up = frozenset(each.id for each in workloads if inputs.is_given_up(each.id))
    is_rolling = rolling is not None
    return RequestedSizes(
        *(inputs.sizes, inputs.declared, workloads, given_up, is_rolling),
        flips=FlipState(flexible_pair(cluster.spec), inputs.flips, inputs.may_flip),
    )


PoolAccelerators = Mapping[tuple[str, str, str], tuple[int, int]]
"""Numbers of accelerators by role, pool and type: of workers that should run, and of ready ones."""

# Roles that answer requests; decode and mixed workers behind routers do too
ANSWERING = ("decode", "mixed", ROUTER)


def serving_replicas(cluster: PDCluster, plan: ClusterPlan) -> dict[str, int]:
    """Replicas by answering role in the revision that the Service selects; 0 = none of that role.
    Routers count from the time when the Service leads to them. While the old workers end first, as
    with Recreate, nothing answers: then the declared replicas count.
    """
    sizes = [
        (each.id.role, each.replicas)
        for each in plan.workloads
        if plan.is_wide or each.id.revision == plan.serving
    ]
    if plan.ends_first:
        roles = cluster.spec.roles.present()
        sizes = [(role, pool.replicas) for role, spec in roles.items() for pool in spec.pools]
    found = dict.fromkeys(ANSWERING, 0)
    flipped = plan.flipped
    if flipped is not None:
        sizes += [(key[0], -flipped.away(key)) for key in (flipped.home, flipped.to)]
    for role, replicas in sizes:
        if role in found and (role != ROUTER or plan.serving_role == ROUTER):
            found[role] += replicas
    return found


def accelerators_of_pools(
    cluster: PDCluster, plan: ClusterPlan, observed: Observed
) -> PoolAccelerators:
    """Accelerators of all revisions that should run, and of ready workers, by role, pool and type.

    A worker without any counts as one where its type has a price, and otherwise not.
    """
    spec, known = cluster.spec, {state.id: state for state in observed.workloads}
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for each in plan.workloads:
        role = spec.roles.present().get(each.id.role)
        pools = [pool for pool in role.pools if pool.name == each.id.pool] if role else []
        state = known.get(each.id)
        gpu = (state and state.gpu) or (pools[0].gpu if pools else "")
        is_counted = gpu != NO_ACCELERATOR or spec.price_per_hour(gpu) is not None
        if each.id.role in ENGINELESS or not gpu or not is_counted:
            continue
        number = (state and state.gpus_per_replica) or (
            spec.gpus_per_replica(each.id.role, pools[0]) if pools else 1
        )
        key = (each.id.role, each.id.pool, gpu)
        desired, ready = found.get(key, (0, 0))
        workers = each.replicas
        if plan.flipped is not None and each.id.revision == plan.serving:
            workers -= plan.flipped.away((each.id.role, each.id.pool))
        of_state = min(state.ready, workers) if state else 0
        found[key] = (desired + workers * number, ready + of_state * number)
    return found
