"""The plan of one cluster: from spec and observed state to desired state; of an invalid spec, its
status.

Pure, and without memory except the status that was last written.  Everything
that is not in a plan is to be removed; planning again on what a plan led to
gives the same plan.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pdcluster_api.plan.drain.disruption import Patience, next_loss, plan_budgets
from pdcluster_api.plan.drain.draining import Drain, plan_drain
from pdcluster_api.plan.observed.pools import PREFILL, ingress_of
from pdcluster_api.plan.observed.previous import Previous
from pdcluster_api.plan.observed.state import Observed
from pdcluster_api.plan.result import ClusterPlan, Event, ScalerPlan
from pdcluster_api.plan.rollout.progress import (
    rollout_field,
    seconds_left,
)
from pdcluster_api.plan.rollout.steps import Step, next_step
from pdcluster_api.plan.scene import Scene, scene_of
from pdcluster_api.plan.sizes.pool_facts import Asked
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
    Facts,
    condition_tree,
)
from pdcluster_api.plan.status.disaggregating import Found, disaggregating, said_by
from pdcluster_api.plan.status.events import events
from pdcluster_api.plan.status.fields import (
    Status,
    dated,
    identity_fields,
    kept_field,
    number_fields,
)
from pdcluster_api.plan.status.insync import InSync, in_sync
from pdcluster_api.plan.status.invalid import plan_invalid
from pdcluster_api.plan.status.over_budget import SideBySide, rollout_over_budget
from pdcluster_api.plan.status.transfers import Asked as AskedTransfers
from pdcluster_api.plan.status.transfers import Pairs, Transfers, transfers
from pdcluster_api.plan.wanted import kept_workloads, leaving_pools, of_target, size_before
from pdcluster_api.schema.pdcluster import PDCluster
from pdcluster_api.schema.sections import ROUTER
from pdcluster_api.schema.workload import Workload

__all__ = ["asked_of", "plan_cluster", "plan_invalid", "sizes_of"]


@dataclass(frozen=True)
class Beside:
    """Parts of the status beside Ready that more than the status follows from."""

    registered: InSync
    verified: Transfers
    over_budget: Condition | None


def plan_cluster(cluster: PDCluster, observed: Observed, now: str) -> ClusterPlan:
    """Plan everything.  now: RFC 3339 in UTC, for conditions that change in this reconcile."""
    scene = scene_of(cluster, observed, now)
    step = next_step(
        cluster.spec.rollout.strategy,
        scene.target,
        observed,
        is_target_ready=scene.is_target_ready,
        lost=scene.ending.lost,
    )
    kept, leaving = tuple(kept_workloads(scene, step)), leaving_pools(scene)
    drain = _drain(scene, (*of_target(scene, step), *kept, *leaving))
    registered = in_sync(observed.worker_records, observed.workloads, Previous(observed.status))
    verified = _transfers(scene, step, now)
    over = _over_budget(scene, (*of_target(scene, step), *kept))
    beside = Beside(registered, verified, over)
    status = {
        **_status(scene, step, leaving, now, drain=drain, beside=beside),
        **kept_field([*kept, *leaving]),
    }
    is_decision = cluster.spec.autoscale.mode == ON and is_new(cluster.spec.autoscale, observed)
    is_over = over is not None and not Previous(observed.status).is_true(over.type)
    # While the Service cannot be written, clients reach the revision that it still selects.
    reached = (step.serving, observed.service_revision)
    serving = [workload for workload in drain.workloads if workload.id.revision in reached]
    patience = Patience(now, scene.deadline)
    found = (
        drain.requeue_after_seconds,
        registered.requeue_after_seconds,
        verified.requeue_after_seconds,
        seconds_left(scene.rollout, now),
        next_loss(serving, observed.workloads, patience),
        scene.ending.next_seconds,
    )
    looks = [seconds for seconds in found if seconds is not None]
    return ClusterPlan(
        serving=step.serving,
        serving_role=_serving_role(scene, step),
        workloads=drain.workloads,
        scalers=tuple(_scalers(scene)),
        status=status,
        events=(*events(observed.status, status), *_autoscale_events(scene, status)),
        reports_first=is_decision or is_over,
        ends_first=step.waits_for is not None,
        requeue_after_seconds=min(looks, default=None),
        commands=drain.commands,
        cut=drain.cut,
        budgets=plan_budgets(
            serving, observed.workloads, drain.commands, observed.budgets, patience
        ),
        ghosts=registered.ghosts,
        needs_worker_records=drain.needs_worker_records,
        verify=verified.due,
    )


def sizes_of(cluster: PDCluster, observed: Observed) -> tuple[PoolSize, ...]:
    """The size of every declared pool as it is asked for now."""
    return scene_of(cluster, observed).sizes


def asked_of(cluster: PDCluster, observed: Observed) -> Asked:
    """Replicas that are asked for now, by workload.

    This includes growth, after which the declared revision is not whole: it cannot take over yet.
    """
    scene = scene_of(cluster, observed)
    step = next_step(cluster.spec.rollout.strategy, scene.target, observed, is_target_ready=False)
    workloads = (*of_target(scene, step), *kept_workloads(scene, step), *leaving_pools(scene))
    return Asked(scene.sizes, scene.target, workloads, is_given_up=scene.is_given_up)


def _serving_role(scene: Scene, step: Step) -> str:
    """The role that answers in the revision that serves: an older one may have had other roles."""
    if step.serving == scene.target:
        return _ingress_role(scene)
    kept = ingress_of(
        workload.role
        for workload in step.kept
        if workload.role != ROUTER or size_before(scene, workload)
    )
    return kept or scene.there.ingress_role(step.serving) or scene.cluster.spec.ingress_role


def _ingress_role(scene: Scene) -> str:
    """The role that answers in the declared revision.

    Of routers it takes one that is asked for.  A Service that leads to decode or mixed workers,
    since there were no routers, leads on to them until one is ready.
    """
    decode_role = scene.cluster.spec.decode_role
    if not any(size.wanted for size in scene.sizes if size.role == ROUTER):
        return decode_role
    states = scene.there.of_revision(scene.target)
    is_ready = any(state.ready for state in states if state.id.role == ROUTER and not state.gone)
    selected = (scene.observed.service_revision, scene.observed.service_role)
    return decode_role if selected == (scene.target, decode_role) and not is_ready else ROUTER


def _drain(scene: Scene, wanted: tuple[Workload, ...]) -> Drain:
    """Replicas to which workloads may shrink now; undeclared pools that serve shrink to 0 before
    they go.

    Not with Recreate, and not of a replaced revision: they go as a whole, and their pods drain as
    they end.  So do the workers of a revision that is given up, which no Service selects: etcd,
    which may be the cause, is not asked.
    """
    is_dropped = scene.is_given_up and scene.observed.service_revision != scene.target
    dropped = [each for each in wanted if is_dropped and each.id.revision == scene.target]
    drained = [each for each in wanted if each not in dropped]
    planned = {workload.id for workload in wanted}
    is_drained_first = (
        scene.current == scene.target and scene.cluster.spec.rollout.strategy != "Recreate"
    )
    states = [
        state
        for state in scene.there.of_revision(scene.target)
        if not state.gone and state.id not in planned
    ]
    timeout = scene.cluster.spec.rollout.drain_timeout_seconds
    leaving = states if is_drained_first else ()
    drain = plan_drain(
        drained, leaving, scene.observed.workloads, scene.observed.worker_records, timeout
    )
    return replace(drain, workloads=(*dropped, *drain.workloads))


def _over_budget(scene: Scene, workloads: tuple[Workload, ...]) -> Condition | None:
    """Condition of two revisions that exceed the budget together; none with Recreate."""
    if scene.cluster.spec.rollout.strategy == "Recreate":
        return None
    side_by_side = SideBySide(scene.target, workloads, scene.sizes, scene.observed.workloads)
    return rollout_over_budget(scene.cluster.spec.autoscale, side_by_side)


def _scalers(scene: Scene) -> Iterator[ScalerPlan]:
    for size in scene.sizes:
        yield plan_scaler(scene.cluster.metadata.name, size, scene.shown(size), scene.target)


def _status(
    scene: Scene,
    step: Step,
    leaving: Iterable[Workload],
    now: str,
    *,
    drain: Drain,
    beside: Beside,
) -> Status:
    observed, views = scene.observed, tuple(scene.views())
    previous = Previous(observed.status)
    facts = Facts(
        roles=views,
        observed=observed,
        previous=previous,
        target=scene.target,
        current=scene.current,
        waits_for=step.waits_for,
        leaving=tuple(workload.id for workload in leaving),
        draining=drain.messages,
        stalled=None if scene.rollout is None else scene.rollout.stalled,
        deadline=scene.deadline,
        is_given_up=scene.is_given_up,
        ingress_role=observed.service_role
        or scene.there.ingress_role(observed.service_revision)
        or scene.cluster.spec.ingress_role,
        num_answering=scene.there.num_answering(observed.service_revision, observed.service_role),
        has_prefill=scene.there.has_prefill(observed.service_revision),
        lost=scene.ending.lost,
    )
    autoscale = scene.cluster.spec.autoscale
    together = _disaggregating(scene, step)
    in_use = accelerators_in_use(scene.cluster, views, observed.worker_records, previous)
    others = (
        beside.registered.condition,
        in_use,
        together.condition,
        beside.verified.condition,
        beside.over_budget,
    )
    found = (
        *condition_tree(facts),
        *(each for each in others if each is not None),
        *autoscale_conditions(autoscale, observed),
    )
    return {
        "observedGeneration": observed.generation,
        **identity_fields(scene.cluster, revision=scene.target, serving=step.serving),
        **number_fields(views),
        **rollout_field(scene.rollout),
        **autoscaling_fields(autoscale, observed),
        **together.fields,
        **beside.verified.fields,
        "conditions": dated(found, previous, generation=observed.generation, now=now),
    }


def _disaggregating(scene: Scene, step: Step) -> Found:
    """Disaggregation of the serving revision's workers; None for mixed ones."""
    if _serving_role(scene, step) == "mixed" or PREFILL not in scene.cluster.spec.roles.present():
        return Found()
    worker_records = scene.observed.worker_records
    said = None
    if worker_records is not None and worker_records.error is None:
        said = said_by(worker_records, scene.there.of_revision(step.serving))
    threshold = scene.cluster.spec.prefill_length_threshold
    return disaggregating(said, Previous(scene.observed.status), threshold)


def _transfers(scene: Scene, step: Step, now: str) -> Transfers:
    """Verifications of transfers between the pools of the serving revision; None for mixed ones."""
    if _serving_role(scene, step) == "mixed" or PREFILL not in scene.cluster.spec.roles.present():
        return Transfers()
    observed, placement = scene.observed, scene.cluster.spec.placement
    return transfers(
        Pairs.of(step.serving, scene.there.of_revision(step.serving)),
        Previous(observed.status),
        observed.verifications.ended,
        observed.verifications.waits,
        AskedTransfers(
            floor=placement.min_transfer_gbps if placement else None,
            request=observed.verify_request,
            now=now,
        ),
    )


def _autoscale_events(scene: Scene, status: Status) -> Iterator[Event]:
    yield from decision_events(scene.observed.status, status)
    yield from overridden(scene.cluster.spec.autoscale, scene.sizes, scene.observed)
