"""Reconcile one PDCluster, level-triggered: from the observed state, whatever enqueued it. Of an
invalid object only the status is written; of one that is being deleted nothing.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pdcluster_api.apiserver.errors import ConflictError, UnavailableError
from pdcluster_api.apiserver.kinds import PDCLUSTER, Key
from pdcluster_api.apiserver.observe import Live, observe
from pdcluster_api.plan.cluster import (
    DesiredState,
    accelerators_of_pools,
    desired_state,
    plan_cluster,
    serving_replicas,
)
from pdcluster_api.plan.cluster_status import plan_invalid, plan_status
from pdcluster_api.plan.observed.state import DiscoveryState
from pdcluster_api.plan.result import ClusterPlan, PlannedEvent, StatusPlan
from pdcluster_api.plan.status.events import cut_short
from pdcluster_operator.queue.work_queue import Done
from pdcluster_operator.reconcile.apply_plan import ApplyResult, PlanApplier, certificates_end
from pdcluster_operator.reconcile.lost_pods import LostPods
from pdcluster_operator.reconcile.metrics import ControllerMetrics
from pdcluster_operator.reconcile.observation import (
    Observation,
    ParsedClusters,
    key_secret_fault,
    live_cluster,
    observe_cluster,
    refresh_records,
    versions_of,
)
from pdcluster_operator.reconcile.session import Session, Sessions
from pdcluster_operator.reconcile.statuses import EventRecorder
from pdcluster_schema import conditions
from pdcluster_schema.faults import InvalidObjectError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reconciler:
    applier: PlanApplier
    sessions: Sessions
    events: EventRecorder
    metrics: ControllerMetrics
    lost_pods: LostPods
    parsed: ParsedClusters = field(default_factory=ParsedClusters)

    async def reconcile(self, key: Key) -> Done:
        """Reconcile once.  A transient failure is retried; an error of our own is raised."""
        # 1. Skip it if nothing has changed since a reconcile that left nothing to do.
        # 2. Observe: the object and its children, etcd, Secrets, events.  End one that is gone.
        # 3. Plan what should run (pure), again if that needs newer records of workers.  What the
        #    status must hold before it is followed is reported, and nothing applied this time.
        # 4. Apply: drain commands, then the objects that differ, then records of lost workers.
        # 5. Report: plan the status with what was refused, write the copy of its conditions for
        #    workers and then the status where they differ, post events.
        #    That of a new object waits for the next reconcile, which sees its children.
        # 6. Mark the fingerprint of step 4 as at rest; come back when something falls due.
        cache, client = self.applier.cache, self.applier.client
        try:
            if (unchanged := await self._unchanged(key)) is not None:
                return unchanged
            # before it is observed: what changes during that is seen by the next reconcile
            change = cache.change(key)
            live = await live_cluster(client, cache, key)
            if live is None or live.is_going:
                self._forget(key)
                return Done()
            session = self._session(live)
            nodes = await self.lost_pods.nodes(live)
            try:
                found = await observe_cluster(
                    *(client, live, self.parsed, session, change), cache=cache, lost_nodes=nodes
                )
            except InvalidObjectError as e:
                return await self._report_invalid(live, session, e)
            done = await self._apply(found, session)
        except (UnavailableError, ConflictError) as e:
            logger.warning("reconcile not finished key=%s error=%s", key, e)
            return Done(try_again=True, wrote=True)
        if session.needs_requeue:
            return replace(done, requeue_after_seconds=0.0, try_again=False)
        return done

    async def _apply(self, found: Observation, session: Session) -> Done:
        found, desired, plan = await self._plan(found, session)
        # recorded before anything follows it, so that the next reconcile knows it
        if plan.reports_first:
            await self._report(found.live, session, plan_status(desired))
            return Done(requeue_after_seconds=0.0, wrote=True)
        serving = serving_replicas(found.cluster, plan)
        self.metrics.show_cluster(found.live.key, serving, found.cluster.spec.qos.slo)
        accelerators = accelerators_of_pools(found.cluster, plan, desired.inputs.observed)
        self.metrics.capacity.show(found.live.key, found.cluster.spec, accelerators)
        self.metrics.show_certificates(found.live.key, certificates_end(found.live))
        result = await self.applier.apply(found, plan, session)
        lost = await self.lost_pods.delete(found.live, desired.inputs.ending.lost)
        result = result.also(lost)
        self.metrics.drains_cut.labels(*found.live.key).inc(len(result.cut))
        if _is_just_made(found, result, session):
            return Done(wrote=True)
        if result.failures != session.failures:
            # in the status of this reconcile, and of the next ones
            session.failures = result.failures
            observed = replace(found.observed, failures=result.failures)
            desired = desired_state(found.cluster, observed, desired.now)
        report = plan_status(desired)
        events = (*cut_short(result.cut), *result.events)
        is_reported = await self._report(found.live, session, report, events)
        after = self.applier.statuses.after(found.live) if is_reported else None
        if session.fingerprint and after:
            session.fingerprint = session.fingerprint.over(after, plan)
        if result.conflict is not None:
            raise result.conflict
        verify_after = session.verification.verify(report.verify, found.live)
        planned = _earliest(report.requeue_after_seconds, verify_after, lost.requeue_after_seconds)
        due = _earliest(result.requeue_after_seconds, planned)
        if session.fingerprint and not is_reported and _is_quiet(found, plan, report, session):
            now = self.applier.now()
            session.fingerprint = session.fingerprint.at_rest(found.inputs, planned, now)
        return Done(
            requeue_after_seconds=_earliest(found.requeue_after_seconds, due),
            try_again=bool(result.failures),
            wrote=result.wrote or is_reported,
        )

    async def _plan(
        self, found: Observation, session: Session
    ) -> tuple[Observation, DesiredState, ClusterPlan]:
        while True:
            desired = desired_state(found.cluster, found.observed, self._stamp())
            plan = plan_cluster(desired)
            if found.is_fresh or plan.reports_first or not plan.needs_worker_records:
                return found, desired, plan
            found = await refresh_records(found, session)

    async def _unchanged(self, key: Key) -> Done | None:
        """Result of a reconcile that would find what the last one found, which left nothing to do.
        None = it may find something else.
        """
        session, now = self.sessions.find(key), self.applier.now()
        fingerprint = session and session.fingerprint
        if not session or not fingerprint or fingerprint.observed is None:
            return None
        before, left = fingerprint.observed, fingerprint.rest_seconds(now)
        known = self.applier.cache.change(key), session.etcd.standing
        is_decided = session.autoscaling.has_decided or session.verification.has_outcome
        if known != (before.change, before.etcd) or not left or is_decided:
            return None
        if before.others != versions_of(self.applier.cache, session.others):
            return None
        if await key_secret_fault(self.applier.client, key.namespace, before.key_secret):
            return None
        faults, seconds = await session.pod_faults.again(key.namespace)
        if faults != before.faults:
            return None
        session.etcd.read_if_due()
        return Done(requeue_after_seconds=_earliest(left, seconds))

    async def _report_invalid(
        self, live: Live, session: Session, error: InvalidObjectError
    ) -> Done:
        session.autoscaling.stop()
        session.verification.stop()
        observed = observe(live, discovery=DiscoveryState(managed=True), faults={})
        report = plan_invalid(error.faults, observed, self._stamp())
        is_reported = await self._report(live, session, report)
        return Done(requeue_after_seconds=0.0 if session.needs_requeue else None, wrote=is_reported)

    async def _report(
        self, live: Live, session: Session, report: StatusPlan, others: Iterable[PlannedEvent] = ()
    ) -> bool:
        written = report.status.get("conditions", ())
        found = {each["type"]: each["status"] for each in written}
        ready = found.get(conditions.READY, "Unknown")
        self.metrics.show_ready(session.ready, ready)
        self.metrics.show_status(live.key, report.status)
        session.ready = ready
        statuses = self.applier.statuses
        # before the status: once that is there, workers can read the same
        changed = await statuses.write_conditions(live, written, self._stamp())
        changed |= await statuses.write(session, PDCLUSTER, live.body, report.status)
        if self.applier.cache.get(PDCLUSTER.name, *live.key) is None:
            return changed
        events = (*report.events, *others)
        posted = [await self.events.post(live.body, event) for event in events]
        return changed or any(posted)

    def _session(self, live: Live) -> Session:
        """The session of the object, and not that of an earlier one of its name."""
        if self.sessions.of(live.key).uid not in (None, live.uid):
            self._forget(live.key)
        session = self.sessions.of(live.key)
        session.begin(live.uid)
        return session

    def _forget(self, key: Key) -> None:
        session = self.sessions.end(key)
        if session is not None:
            self.metrics.show_ready(session.ready, None)
            self.metrics.forget(key)

    def _stamp(self) -> str:
        return self.applier.now().strftime("%Y-%m-%dT%H:%M:%SZ")


def _is_just_made(found: Observation, result: ApplyResult, session: Session) -> bool:
    """Return whether a new PDCluster has its children now: its first status is written by the next
    reconcile, which follows at once and knows them.
    """
    is_whole = not (result.failures or result.conflict or result.events or result.cut)
    is_new = not (found.live.children or found.observed.status.get("conditions"))
    return is_new and session.needs_requeue and is_whole


def _is_quiet(found: Observation, plan: ClusterPlan, report: StatusPlan, session: Session) -> bool:
    is_busy = plan.commands or plan.stale_records or report.events or plan.needs_worker_records
    is_unsettled = session.needs_requeue or session.failures or found.observed.key_fault is not None
    return not (is_busy or is_unsettled or found.inputs.etcd is None)


def _earliest(*seconds: float | None) -> float | None:
    return min((each for each in seconds if each is not None), default=None)
