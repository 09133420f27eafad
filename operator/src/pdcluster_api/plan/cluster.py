"""The plan of one cluster: from spec and observed state to desired state; of an invalid spec, its
status.

Pure, and without memory except the status that was last written.  Everything
that is not in a plan is to be removed; planning again on what a plan led to
gives the same plan.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pdcluster_api.plan.desired import kept_workloads, leaving_pools, size_before, target_workloads
from pdcluster_api.plan.drain.disruption import ReadinessDeadline, next_loss, plan_budgets
from pdcluster_api.plan.drain.draining import DrainPlan, plan_drain
from pdcluster_api.plan.inputs import PlanInputs, plan_inputs
from pdcluster_api.plan.observed.pools import PREFILL, ingress_of
from pdcluster_api.plan.observed.previous import Previous
from pdcluster_api.plan.observed.state import Observed
from pdcluster_api.plan.result import ClusterPlan, PlannedEvent, ScalerPlan
from pdcluster_api.plan.rollout.progress import (
    rollout_field,
    seconds_left,
)
from pdcluster_api.plan.rollout.steps import RolloutStep, next_step
from pdcluster_api.plan.sizes.pool_facts import RequestedSizes
from pdcluster_api.plan.sizes.scalers import PoolSize, plan_scaler
from pdcluster_api.plan.status.accelerators import accelerators_in_use
from pdcluster_api.plan.status.autoscaled import (
    ON,
    autoscale_conditions,
    autoscaling_fields,
    decision_events,
    is_new,
    overridden,
)
from pdcluster_api.plan.status.condition import Condition
from pdcluster_api.plan.status.conditions import (
    StatusInputs,
    condition_tree,
)
from pdcluster_api.plan.status.disaggregating import (
    DisaggregationResult,
    disaggregating,
    reports_of,
)
from pdcluster_api.plan.status.events import events
from pdcluster_api.plan.status.fields import (
    Status,
    dated,
    identity_fields,
    kept_field,
    number_fields,
)
from pdcluster_api.plan.status.in_sync import InSync, in_sync
from pdcluster_api.plan.status.invalid import plan_invalid
from pdcluster_api.plan.status.over_budget import SideBySide, rollout_over_budget
from pdcluster_api.plan.status.transfers import Pairs, Transfers, VerificationSettings, transfers
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.sections import ROUTER
from pdcluster_schema.workload import Workload

__all__ = ["plan_cluster", "plan_invalid", "requested_sizes", "sizes_of"]


@dataclass(frozen=True)
class PlannedConditions:
    """Parts of the status beside Ready that more than the status follows from."""

    registered: InSync
    verified: Transfers
    over_budget: Condition | None


def plan_cluster(cluster: PDCluster, observed: Observed, now: str) -> ClusterPlan:
    """Plan everything.  now: RFC 3339 in UTC, for conditions that change in this reconcile."""
    inputs = plan_inputs(cluster, observed, now)
    step = next_step(
        cluster.spec.rollout.strategy,
        inputs.target,
        observed,
        is_target_ready=inputs.is_target_ready,
        lost=inputs.ending.lost,
    )
    kept, leaving = tuple(kept_workloads(inputs, step)), leaving_pools(inputs)
    drain = _drain(inputs, (*target_workloads(inputs, step), *kept, *leaving))
    registered = in_sync(observed.worker_records, observed.workloads, Previous(observed.status))
    verified = _transfers(inputs, step, now)
    over = _over_budget(inputs, (*target_workloads(inputs, step), *kept))
    planned = PlannedConditions(registered, verified, over)
    status = {
        **_status(inputs, step, leaving, now, drain=drain, planned=planned),
        **kept_field([*kept, *leaving]),
    }
    is_decision = cluster.spec.autoscale.mode == ON and is_new(cluster.spec.autoscale, observed)
    is_over = over is not None and not Previous(observed.status).is_true(over.type)
    # While the Service cannot be written, clients reach the revision that it still selects.
    reached = (step.serving, observed.service_revision)
    serving = [workload for workload in drain.workloads if workload.id.revision in reached]
    patience = ReadinessDeadline(now, inputs.deadline)
    found = (
        drain.requeue_after_seconds,
        registered.requeue_after_seconds,
        verified.requeue_after_seconds,
        seconds_left(inputs.rollout, now),
        next_loss(serving, observed.workloads, patience),
        inputs.ending.next_seconds,
    )
    waits = [seconds for seconds in found if seconds is not None]
    return ClusterPlan(
        serving=step.serving,
        serving_role=_serving_role(inputs, step),
        workloads=drain.workloads,
        scalers=tuple(_scalers(inputs)),
        status=status,
        events=(*events(observed.status, status), *_autoscale_events(inputs, status)),
        reports_first=is_decision or is_over,
        ends_first=step.waits_for is not None,
        requeue_after_seconds=min(waits, default=None),
        commands=drain.commands,
        cut=drain.cut,
        budgets=plan_budgets(
            serving, observed.workloads, drain.commands, observed.budgets, patience
        ),
        stale_records=registered.stale_records,
        needs_worker_records=drain.needs_worker_records,
        verify=verified.due,
    )


def sizes_of(cluster: PDCluster, observed: Observed) -> tuple[PoolSize, ...]:
    """The size of every declared pool as it is asked for now."""
    return plan_inputs(cluster, observed).sizes


def requested_sizes(cluster: PDCluster, observed: Observed) -> RequestedSizes:
    """Replicas that are asked for now, by workload.

    This includes growth, after which the declared revision is not whole: it cannot take over yet.
    """
    inputs = plan_inputs(cluster, observed)
    step = next_step(cluster.spec.rollout.strategy, inputs.target, observed, is_target_ready=False)
    workloads = (
        *target_workloads(inputs, step),
        *kept_workloads(inputs, step),
        *leaving_pools(inputs),
    )
    return RequestedSizes(
        inputs.sizes, inputs.target, workloads, is_rolled_back=inputs.is_rolled_back
    )


def _serving_role(inputs: PlanInputs, step: RolloutStep) -> str:
    """The role that answers in the revision that serves: an older one may have had other roles."""
    if step.serving == inputs.target:
        return _ingress_role(inputs)
    kept = ingress_of(
        workload.role
        for workload in step.kept
        if workload.role != ROUTER or size_before(inputs, workload)
    )
    return kept or inputs.existing.ingress_role(step.serving) or inputs.cluster.spec.ingress_role


def _ingress_role(inputs: PlanInputs) -> str:
    """The role that answers in the declared revision.

    Of routers it takes one that is asked for.  A Service that leads to decode or mixed workers,
    since there were no routers, leads on to them until one is ready.
    """
    decode_role = inputs.cluster.spec.decode_role
    if not any(size.desired for size in inputs.sizes if size.role == ROUTER):
        return decode_role
    states = inputs.existing.of_revision(inputs.target)
    is_ready = any(state.ready for state in states if state.id.role == ROUTER and not state.gone)
    selected = (inputs.observed.service_revision, inputs.observed.service_role)
    return decode_role if selected == (inputs.target, decode_role) and not is_ready else ROUTER


def _drain(inputs: PlanInputs, desired: tuple[Workload, ...]) -> DrainPlan:
    """Replicas to which workloads may shrink now; undeclared pools that serve shrink to 0 before
    they go.

    Not with Recreate, and not of a replaced revision: they go as a whole, and their pods drain as
    they end.  So do the workers of a revision that is given up, which no Service selects: etcd,
    which may be the cause, is not asked.
    """
    is_dropped = inputs.is_rolled_back and inputs.observed.service_revision != inputs.target
    dropped = [each for each in desired if is_dropped and each.id.revision == inputs.target]
    drained = [each for each in desired if each not in dropped]
    planned = {workload.id for workload in desired}
    is_drained_first = (
        inputs.current == inputs.target and inputs.cluster.spec.rollout.strategy != "Recreate"
    )
    states = [
        state
        for state in inputs.existing.of_revision(inputs.target)
        if not state.gone and state.id not in planned
    ]
    timeout = inputs.cluster.spec.rollout.drain_timeout_seconds
    leaving = states if is_drained_first else ()
    drain = plan_drain(
        drained, leaving, inputs.observed.workloads, inputs.observed.worker_records, timeout
    )
    return replace(drain, workloads=(*dropped, *drain.workloads))


def _over_budget(inputs: PlanInputs, workloads: tuple[Workload, ...]) -> Condition | None:
    """Condition of two revisions that exceed the budget together; none with Recreate."""
    if inputs.cluster.spec.rollout.strategy == "Recreate":
        return None
    side_by_side = SideBySide(inputs.target, workloads, inputs.sizes, inputs.observed.workloads)
    return rollout_over_budget(inputs.cluster.spec.autoscale, side_by_side)


def _scalers(inputs: PlanInputs) -> Iterator[ScalerPlan]:
    for size in inputs.sizes:
        yield plan_scaler(inputs.cluster.metadata.name, size, inputs.shown(size), inputs.target)


def _status(
    inputs: PlanInputs,
    step: RolloutStep,
    leaving: Iterable[Workload],
    now: str,
    *,
    drain: DrainPlan,
    planned: PlannedConditions,
) -> Status:
    observed, views = inputs.observed, tuple(inputs.views())
    previous = Previous(observed.status)
    facts = StatusInputs(
        roles=views,
        observed=observed,
        previous=previous,
        target=inputs.target,
        current=inputs.current,
        waits_for=step.waits_for,
        leaving=tuple(workload.id for workload in leaving),
        draining=drain.messages,
        stalled=None if inputs.rollout is None else inputs.rollout.stalled,
        deadline=inputs.deadline,
        is_rolled_back=inputs.is_rolled_back,
        ingress_role=observed.service_role
        or inputs.existing.ingress_role(observed.service_revision)
        or inputs.cluster.spec.ingress_role,
        num_answering=inputs.existing.num_answering(
            observed.service_revision, observed.service_role
        ),
        has_prefill=inputs.existing.has_prefill(observed.service_revision),
        lost=inputs.ending.lost,
    )
    autoscale = inputs.cluster.spec.autoscale
    disaggregation = _disaggregating(inputs, step)
    in_use = accelerators_in_use(inputs.cluster, views, observed.worker_records, previous)
    others = (
        planned.registered.condition,
        in_use,
        disaggregation.condition,
        planned.verified.condition,
        planned.over_budget,
    )
    found = (
        *condition_tree(facts),
        *(each for each in others if each is not None),
        *autoscale_conditions(autoscale, observed),
    )
    return {
        "observedGeneration": observed.generation,
        **identity_fields(inputs.cluster, revision=inputs.target, serving=step.serving),
        **number_fields(views),
        **rollout_field(inputs.rollout),
        **autoscaling_fields(autoscale, observed),
        **disaggregation.fields,
        **planned.verified.fields,
        "conditions": dated(found, previous, generation=observed.generation, now=now),
    }


def _disaggregating(inputs: PlanInputs, step: RolloutStep) -> DisaggregationResult:
    """Disaggregation of the serving revision's workers; None for mixed ones."""
    if _serving_role(inputs, step) == "mixed" or PREFILL not in inputs.cluster.spec.roles.present():
        return DisaggregationResult()
    worker_records = inputs.observed.worker_records
    reports = None
    if worker_records is not None and worker_records.error is None:
        reports = reports_of(worker_records, inputs.existing.of_revision(step.serving))
    threshold = inputs.cluster.spec.prefill_length_threshold
    return disaggregating(reports, Previous(inputs.observed.status), threshold)


def _transfers(inputs: PlanInputs, step: RolloutStep, now: str) -> Transfers:
    """Verifications of transfers between the pools of the serving revision; None for mixed ones."""
    if _serving_role(inputs, step) == "mixed" or PREFILL not in inputs.cluster.spec.roles.present():
        return Transfers()
    observed, placement = inputs.observed, inputs.cluster.spec.placement
    return transfers(
        Pairs.of(step.serving, inputs.existing.of_revision(step.serving)),
        Previous(observed.status),
        observed.verifications.ended,
        observed.verifications.waits,
        VerificationSettings(
            floor=placement.min_transfer_gbps if placement else None,
            request=observed.verify_request,
            now=now,
        ),
    )


def _autoscale_events(inputs: PlanInputs, status: Status) -> Iterator[PlannedEvent]:
    yield from decision_events(inputs.observed.status, status)
    yield from overridden(inputs.cluster.spec.autoscale, inputs.sizes, inputs.observed)
