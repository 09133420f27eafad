"""The plan of one cluster: from spec and observed state to desired state; of an invalid spec, its
status.

Pure, and without memory except the status that was last written.  Everything
that is not in a plan is to be removed; planning again on what a plan led to
gives the same plan.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pdcluster_api.plan.drain.disruption import Patience, next_loss, plan_budgets
from pdcluster_api.plan.drain.draining import Drain, plan_drain
from pdcluster_api.plan.observed.pools import PREFILL, DeclaredPool, RoleView, Workloads, ingress_of
from pdcluster_api.plan.observed.previous import Previous
from pdcluster_api.plan.observed.state import Observed, WorkloadState
from pdcluster_api.plan.result import ClusterPlan, Event, ScalerPlan
from pdcluster_api.plan.rollout.held import is_held
from pdcluster_api.plan.rollout.progress import Rollout, Seen, is_given_up, next_rollout, read_rollout, rollout_field, seconds_left
from pdcluster_api.plan.rollout.steps import Step, current_revision, left_of, next_step
from pdcluster_api.plan.sizes.pool_facts import Asked
from pdcluster_api.plan.sizes.scalers import PoolSize, plan_scaler, pool_sizes
from pdcluster_api.plan.status.accelerators import accelerators_in_use
from pdcluster_api.plan.status.autoscaled import (
    ON,
    autoscale_conditions,
    autoscaled,
    autoscaling_fields,
    decision_events,
    is_new,
    overridden,
)
from pdcluster_api.plan.status.conditions import Facts, condition_tree, discovery_answers, lacks, waiting
from pdcluster_api.plan.status.disaggregating import Found, disaggregating, said_by
from pdcluster_api.plan.status.events import events
from pdcluster_api.plan.status.fields import Status, dated, identity_fields, kept_field, number_fields
from pdcluster_api.plan.status.insync import InSync, in_sync
from pdcluster_api.plan.status.invalid import plan_invalid
from pdcluster_api.schema.pdcluster import PDCluster
from pdcluster_api.schema.revision import revision_of
from pdcluster_api.schema.sections import ROUTER
from pdcluster_api.schema.workload import PoolKey, Workload, WorkloadId

__all__ = ["asked_of", "plan_cluster", "plan_invalid", "sizes_of"]


@dataclass(frozen=True)
class _Scene:
    """Inputs of one reconcile: the object, the observed state, and the size of every declared pool.

    target:  the declared revision
    current: the revision that serves until this reconcile; None = none does
    is_target_ready: whether the declared revision can take over
    rollout: the one that is under way to it; None = none is
    """

    cluster: PDCluster
    observed: Observed
    there: Workloads
    target: str
    current: str | None
    sizes: tuple[PoolSize, ...]
    is_target_ready: bool
    rollout: Rollout | None

    @property
    def is_beside(self) -> bool:
        """Return whether another revision serves, if only by its name, until the declared one
        is whole.
        """
        return self.cluster.spec.rollout.strategy != "Recreate" and self.current not in (None, self.target)

    @property
    def is_given_up(self) -> bool:
        """Return whether the declared revision has no workers: it stalled beside one that
        answered.
        """
        return is_given_up(self.rollout, self.target, _deadline(self.cluster), is_beside=self.is_beside)

    def shown(self, size: PoolSize) -> WorkloadState | None:
        """The workload of a pool's numbers: of the revision that serves, else of the declared
        one.
        """
        return self.there.of(*size.key, self.current) or self.there.of(*size.key, self.target)


def plan_cluster(cluster: PDCluster, observed: Observed, now: str) -> ClusterPlan:
    """Plan everything.  now: RFC 3339 in UTC, for conditions that change in this reconcile."""
    scene = _scene(cluster, observed, now)
    step = next_step(cluster.spec.rollout.strategy, scene.target, observed, is_target_ready=scene.is_target_ready)
    kept, leaving = tuple(_kept(scene, step)), _leaving(scene)
    drain = _drain(scene, (*_of_target(scene, step), *kept, *leaving))
    registered = in_sync(observed.worker_records, observed.workloads, Previous(observed.status))
    status = {**_status(scene, step, leaving, now, drain=drain, registered=registered), **kept_field([*kept, *leaving])}
    is_decision = cluster.spec.autoscale.mode == ON and is_new(cluster.spec.autoscale, observed)
    # While the Service cannot be written, clients reach the revision that it still selects.
    reached = (step.serving, observed.service_revision)
    serving = [workload for workload in drain.workloads if workload.id.revision in reached]
    patience = Patience(now, _deadline(cluster))
    found = (
        drain.requeue_after_seconds,
        registered.requeue_after_seconds,
        seconds_left(scene.rollout, now),
        next_loss(serving, observed.workloads, patience),
    )
    looks = [seconds for seconds in found if seconds is not None]
    return ClusterPlan(
        serving=step.serving,
        serving_role=_serving_role(scene, step),
        workloads=drain.workloads,
        scalers=tuple(_scalers(scene)),
        status=status,
        events=(*events(observed.status, status), *_autoscale_events(scene, status)),
        is_decision=is_decision,
        ends_first=step.waits_for is not None,
        requeue_after_seconds=min(looks, default=None),
        commands=drain.commands,
        cut=drain.cut,
        budgets=plan_budgets(serving, observed.workloads, drain.commands, observed.budgets, patience),
        ghosts=registered.ghosts,
        needs_worker_records=drain.needs_worker_records,
    )


def sizes_of(cluster: PDCluster, observed: Observed) -> tuple[PoolSize, ...]:
    """The size of every declared pool as it is asked for now."""
    return _scene(cluster, observed).sizes


def asked_of(cluster: PDCluster, observed: Observed) -> Asked:
    """Replicas that are asked for now, by workload.

    This includes growth, after which the declared revision is not whole: it cannot take over yet.
    """
    scene = _scene(cluster, observed)
    step = next_step(cluster.spec.rollout.strategy, scene.target, observed, is_target_ready=False)
    workloads = (*_of_target(scene, step), *_kept(scene, step), *_leaving(scene))
    return Asked(scene.sizes, scene.target, workloads, is_given_up=scene.is_given_up)


def _scene(cluster: PDCluster, observed: Observed, now: str | None = None) -> _Scene:
    """now: RFC 3339; None = the clock of a roll out stands where the last status has it"""
    there, target = Workloads(observed), revision_of(cluster.spec)
    sizes = autoscaled(cluster.spec.autoscale, pool_sizes(cluster.spec, observed.scalers, _before(cluster, observed)), observed)
    is_whole = _is_whole(sizes, {size.key: there.of(*size.key, target) for size in sizes})
    is_target_ready = is_whole and (discovery_answers(observed.discovery) or not _has_ingress(sizes))
    current = current_revision(observed, target, is_target_ready=is_target_ready)
    scene = _Scene(cluster, observed, there, target, current, sizes, is_target_ready, read_rollout(observed.status))
    if now is not None:
        scene = replace(scene, rollout=next_rollout(scene.rollout, _seen(scene, is_whole=is_whole), now))
    return replace(scene, is_target_ready=False) if scene.is_given_up else scene


def _deadline(cluster: PDCluster) -> int:
    return cluster.spec.rollout.progress_deadline_seconds


def _seen(scene: _Scene, *, is_whole: bool) -> Seen:
    """Inputs of a roll out's clock."""
    observed, views = scene.observed, tuple(_views(scene))
    left = left_of(scene.target, observed) if scene.cluster.spec.rollout.strategy == "Recreate" else None
    return Seen(
        revision=scene.target,
        deadline=_deadline(scene.cluster),
        ready=sum(view.num_target_ready for view in views),
        left=0 if left is None else left.num_pods,
        is_under_way=scene.is_beside or left is not None or Previous(observed.status).text("revision") != scene.target,
        is_beside=scene.is_beside,
        is_answered=scene.there.num_answering(scene.current) > 0,
        is_done=scene.is_target_ready and left is None,
        is_whole=is_whole,
        is_held=is_held(observed.failures, scene.cluster.metadata.name),
        lacks=lacks(views, observed.discovery) if left is None else waiting(left),
    )


def _before(cluster: PDCluster, observed: Observed) -> Mapping[PoolKey, int]:
    """Seed of a lost scaler: the size of the last plan, which a StatefulSet that drains may not
    have yet.

    A pool that is not in the status is new, and begins with its `replicas`.  Without a status the
    serving revision counts; of an earlier revision that no longer counts nothing is taken.
    """
    wanted = {key: desired for key, (_, desired) in Previous(observed.status).pools().items()}
    if wanted:
        return wanted
    there, selected, target = Workloads(observed), current_revision(observed), revision_of(cluster.spec)
    return {
        (role, pool.name): state.desired
        for role, spec in cluster.spec.roles.present().items()
        for pool in spec.pools
        if (state := there.of(role, pool.name, selected) or there.of(role, pool.name, target))
    }


def _is_whole(sizes: Iterable[PoolSize], workloads: Mapping[PoolKey, WorkloadState | None]) -> bool:
    """Return whether the declared revision has every worker that it should have.

    Where no worker is to answer requests, there is nothing to wait for.
    """
    wanted = {size.key: size.wanted for size in sizes}
    is_whole = all((state := workloads[key]) is not None and state.ready >= number for key, number in wanted.items())
    return is_whole or not _has_ingress(sizes)


def _has_ingress(sizes: Iterable[PoolSize]) -> bool:
    return any(size.wanted for size in sizes if size.role != PREFILL)


def _serving_role(scene: _Scene, step: Step) -> str:
    """The role that answers in the revision that serves: an older one may have had other roles."""
    if step.serving == scene.target:
        return _ingress_role(scene)
    kept = ingress_of(workload.role for workload in step.kept if workload.role != ROUTER or _size_before(scene, workload))
    return kept or scene.there.ingress_role(step.serving) or scene.cluster.spec.ingress_role


def _ingress_role(scene: _Scene) -> str:
    """The role that answers in the declared revision.

    Of routers it takes one that is asked for.  A Service that leads to decode or mixed workers, for
    there were no routers, leads on to them until one is ready.
    """
    decode_role = scene.cluster.spec.decode_role
    if not any(size.wanted for size in scene.sizes if size.role == ROUTER):
        return decode_role
    states = scene.there.of_revision(scene.target)
    is_ready = any(state.ready for state in states if state.id.role == ROUTER and not state.gone)
    selected = (scene.observed.service_revision, scene.observed.service_role)
    return decode_role if selected == (scene.target, decode_role) and not is_ready else ROUTER


def _of_target(scene: _Scene, step: Step) -> Iterator[Workload]:
    """Workloads of the declared revision; only the existing ones while an older one ends first."""
    for size in scene.sizes:
        if step.waits_for is None or scene.there.of(*size.key, scene.target):
            wanted = 0 if scene.is_given_up else size.wanted
            yield Workload(WorkloadId(scene.cluster.metadata.name, *size.key, scene.target), wanted)


def _kept(scene: _Scene, step: Step) -> Iterator[Workload]:
    """The older workloads that stay, at their pool's size; at their own size if that is more.

    So their scaler counts as ever and edits by hand do not, while a lower `replicas` that came
    with a new revision takes no worker from the serving one.  One whose pool is no longer
    declared keeps its size.
    """
    wanted = {size.key: size.wanted for size in scene.sizes}
    for workload in step.kept:
        sizes = (wanted.get((workload.role, workload.pool)), _size_before(scene, workload))
        yield Workload(workload, max((size for size in sizes if size is not None), default=1))


def _size_before(scene: _Scene, workload: WorkloadId) -> int | None:
    """Size of a workload that stays, as last planned; as it is when it begins to stay; None =
    unknown.
    """
    state = scene.there.of(workload.role, workload.pool, workload.revision)
    return Previous(scene.observed.status).kept().get(workload.name, None if state is None else state.desired)


def _leaving(scene: _Scene) -> tuple[Workload, ...]:
    """Pools of the serving revision that are no longer declared: they answer until their role is
    ready.

    One that answers nothing goes: it would only keep others from what they wait for.
    Not with Recreate, which removes the old pods first.
    """
    if scene.current != scene.target or scene.cluster.spec.rollout.strategy == "Recreate":
        return ()
    declared, unready = {size.key for size in scene.sizes}, {view.name for view in _views(scene) if not view.is_ready}
    states = [state for state in scene.there.of_revision(scene.target) if state.ready and not state.gone and state.id.role in unready]
    left = [state for state in states if (state.id.role, state.id.pool) not in declared]
    return tuple(Workload(state.id, _size_before(scene, state.id) or 0) for state in left)


def _drain(scene: _Scene, wanted: tuple[Workload, ...]) -> Drain:
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
    is_drained_first = scene.current == scene.target and scene.cluster.spec.rollout.strategy != "Recreate"
    states = [state for state in scene.there.of_revision(scene.target) if not state.gone and state.id not in planned]
    timeout = scene.cluster.spec.rollout.drain_timeout_seconds
    leaving = states if is_drained_first else ()
    drain = plan_drain(drained, leaving, scene.observed.workloads, scene.observed.worker_records, timeout)
    return replace(drain, workloads=(*dropped, *drain.workloads))


def _scalers(scene: _Scene) -> Iterator[ScalerPlan]:
    for size in scene.sizes:
        yield plan_scaler(scene.cluster.metadata.name, size, scene.shown(size), scene.target)


def _status(scene: _Scene, step: Step, leaving: Iterable[Workload], now: str, *, drain: Drain, registered: InSync) -> Status:
    observed, previous, views = scene.observed, Previous(scene.observed.status), tuple(_views(scene))
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
        deadline=_deadline(scene.cluster),
        is_given_up=scene.is_given_up,
        ingress_role=observed.service_role or scene.there.ingress_role(observed.service_revision) or scene.cluster.spec.ingress_role,
        num_answering=scene.there.num_answering(observed.service_revision, observed.service_role),
        has_prefill=scene.there.has_prefill(observed.service_revision),
    )
    autoscale = scene.cluster.spec.autoscale
    together = _disaggregating(scene, step)
    in_use = accelerators_in_use(scene.cluster, views, observed.worker_records, previous)
    others = (registered.condition, in_use, together.condition)
    beside = [each for each in others if each is not None]
    found = (*condition_tree(facts), *beside, *autoscale_conditions(autoscale, observed))
    return {
        "observedGeneration": observed.generation,
        **identity_fields(scene.cluster, revision=scene.target, serving=step.serving),
        **number_fields(views),
        **rollout_field(scene.rollout),
        **autoscaling_fields(autoscale, observed),
        **together.fields,
        "conditions": dated(found, previous, generation=observed.generation, now=now),
    }


def _disaggregating(scene: _Scene, step: Step) -> Found:
    """Disaggregation of the serving revision's workers; None for mixed ones."""
    if _serving_role(scene, step) == "mixed" or PREFILL not in scene.cluster.spec.roles.present():
        return Found()
    worker_records, threshold = scene.observed.worker_records, scene.cluster.spec.prefill_length_threshold
    is_known = worker_records is not None and worker_records.error is None
    said = said_by(worker_records, scene.there.of_revision(step.serving)) if worker_records is not None and is_known else None
    return disaggregating(said, Previous(scene.observed.status), threshold)


def _autoscale_events(scene: _Scene, status: Status) -> Iterator[Event]:
    yield from decision_events(scene.observed.status, status)
    yield from overridden(scene.cluster.spec.autoscale, scene.sizes, scene.observed)


def _views(scene: _Scene) -> Iterator[RoleView]:
    for role in scene.cluster.spec.roles.present():
        declared = [DeclaredPool(size.pool.name, size.pool.gpu, size.wanted, size.note) for size in scene.sizes if size.role == role]
        yield scene.there.view(role, declared, target=scene.target, serving=scene.current)
