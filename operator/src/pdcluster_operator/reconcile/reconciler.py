"""Reconcile one PDCluster: look, plan, act, report.

Level-triggered: a reconcile starts from the observed state, whatever enqueued it, and
writes nothing for a cluster that is as it should be.  Of an invalid object only the
status is written; of one that is being deleted nothing.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pdcluster_api.apiserver.body import Key
from pdcluster_api.apiserver.errors import ConflictError, UnavailableError
from pdcluster_api.apiserver.kinds import PDCLUSTER
from pdcluster_api.apiserver.observe import Live, as_it_runs, observe
from pdcluster_api.plan.cluster import plan_cluster, plan_invalid
from pdcluster_api.plan.observed.state import DiscoveryState
from pdcluster_api.plan.result import ClusterPlan, PlannedEvent
from pdcluster_api.plan.status.events import cut_short
from pdcluster_api.plan.status.serving import serving_replicas
from pdcluster_operator.queue.runner import Done
from pdcluster_operator.reconcile.apply_plan import ApplyResult, PlanApplier
from pdcluster_operator.reconcile.key_secret import KeySecret
from pdcluster_operator.reconcile.metrics import ControllerMetrics
from pdcluster_operator.reconcile.observation import (
    Observation,
    observe_cluster,
    read_unread,
    refresh_records,
)
from pdcluster_operator.reconcile.parsed import ParsedClusters
from pdcluster_operator.reconcile.session import Session, Sessions
from pdcluster_operator.reconcile.slices import in_slices
from pdcluster_operator.reconcile.tls import certificates_end
from pdcluster_operator.reconcile.unchanged import Unchanged
from pdcluster_schema import conditions
from pdcluster_schema.errors import InvalidObjectError
from pdcluster_schema.pdcluster import PDCluster

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reconciler:
    """Reconciles PDClusters; what it remembers of one is in its session."""

    actor: PlanApplier
    sessions: Sessions
    key_secret: KeySecret
    metrics: ControllerMetrics
    parsed: ParsedClusters = field(default_factory=ParsedClusters)

    async def reconcile(self, key: Key) -> Done:
        """Reconcile once.  A transient failure is retried; an error of our own is raised."""
        try:
            return await self._still_at_rest(key) or await self._reconcile(key)
        except (UnavailableError, ConflictError) as e:
            logger.warning("reconcile not finished key=%s error=%s", key, e)
            return Done(try_again=True, wrote=True)

    async def _still_at_rest(self, key: Key) -> Done | None:
        """Result of the reconcile of a PDCluster that is at rest; None = it may be none."""
        session, now = self.sessions.find(key), self.actor.now()
        unchanged = None if session is None else session.unchanged
        if session is None or unchanged is None or session.autoscaling.has_decided:
            return None
        change = self.actor.cache.change(key)
        if session.verification.has_outcome or not unchanged.holds(
            change, session.etcd.standing, now
        ):
            return None
        if await self.key_secret.fault(key.namespace, unchanged.key_secret):
            return None
        faults, seconds = await session.pod_faults.again(key.namespace)
        if faults != unchanged.faults:
            return None
        session.etcd.read_if_due()
        left = unchanged.seconds_left(now)
        return Done(requeue_after_seconds=left if seconds is None else min(seconds, left))

    async def _reconcile(self, key: Key) -> Done:
        await read_unread(self.actor.client, self.actor.cache, key)
        # before the look: what changes during it is seen by the next reconcile
        change = self.actor.cache.change(key)
        live = await self._live(key)
        if live is None or live.is_going:
            self._forget(key)
            return Done()
        session = self._session(live)
        session.needs_requeue, session.unchanged = False, None
        done = await self._reconcile_live(live, session, change)
        return (
            replace(done, requeue_after_seconds=0.0, try_again=False)
            if session.needs_requeue
            else done
        )

    async def _reconcile_live(self, live: Live, session: Session, change: int) -> Done:
        try:
            cluster = as_it_runs(self.parsed.of(live), live)
        except InvalidObjectError as e:
            session.autoscaling.stop()
            session.verification.stop()
            observed = observe(live, discovery=DiscoveryState(managed=True), faults={})
            plan = plan_invalid(e.faults, observed, self._stamp())
            return Done(wrote=await self._report(live, session, plan.status, plan.events))
        return await self._reconcile_valid(live, cluster, session, change)

    async def _reconcile_valid(
        self, live: Live, cluster: PDCluster, session: Session, change: int
    ) -> Done:
        found = await observe_cluster(live, cluster, session, self.key_secret)
        standing = session.etcd.standing
        plan = plan_cluster(cluster, found.observed, self._stamp())
        # recorded before anything follows it, so that the next reconcile knows it
        if plan.reports_first:
            await self._report(live, session, plan.status, plan.events)
            return Done(requeue_after_seconds=0.0, wrote=True)
        if plan.needs_worker_records:
            found = await refresh_records(found, session)
            plan = plan_cluster(cluster, found.observed, self._stamp())
        self.metrics.show_cluster(live.key, serving_replicas(cluster, plan), cluster.spec.qos.slo)
        self.metrics.show_certificates(live.key, certificates_end(live))
        result = await self.actor.act(found, plan, session)
        self.metrics.drains_cut.labels(*live.key).inc(len(result.cut))
        if _is_just_made(found, result, session):
            return Done(wrote=True)
        if result.failures != session.failures:
            # in the status of this reconcile, and of the next ones
            session.failures = result.failures
            plan = plan_cluster(
                cluster, replace(found.observed, failures=result.failures), self._stamp()
            )
        events = (*plan.events, *cut_short(result.cut), *result.events)
        is_reported = await self._report(live, session, plan.status, events)
        if result.conflict is not None:
            raise result.conflict
        planned = _earliest(
            plan.requeue_after_seconds, session.verification.verify(plan.verify, live)
        )
        due = _earliest(result.requeue_after_seconds, planned)
        fingerprint = session.fingerprint
        if (
            fingerprint
            and standing is not None
            and not is_reported
            and _is_quiet(found, plan, session)
        ):
            key_secret = cluster.spec.service.api_key_secret
            unchanged = Unchanged(change, standing, found.faults, key_secret, fingerprint.until)
            session.unchanged = unchanged.due_within(planned, self.actor.now())
        return Done(
            requeue_after_seconds=_earliest(found.requeue_after_seconds, due),
            try_again=bool(result.failures),
            wrote=result.wrote or is_reported,
        )

    async def _report(
        self,
        live: Live,
        session: Session,
        status: Mapping[str, Any],
        events: Iterable[PlannedEvent],
    ) -> bool:
        """Write status and events that are new; returns whether there were any."""
        ready = next(
            (
                each["status"]
                for each in status.get("conditions", ())
                if each["type"] == conditions.READY
            ),
            "Unknown",
        )
        self.metrics.show_ready(session.ready, ready)
        self.metrics.show_status(live.key, status)
        session.ready = ready
        return await self.actor.report(live, session, status, events)

    async def _live(self, key: Key) -> Live | None:
        cache = self.actor.cache
        body = cache.get(PDCLUSTER.name, *key)
        return None if body is None else Live(body, await in_slices(cache.children(key)))

    def _session(self, live: Live) -> Session:
        """The session of the object, and not that of an earlier one of its name."""
        if self.sessions.of(live.key).uid not in (None, live.uid):
            self._forget(live.key)
        session = self.sessions.of(live.key)
        session.uid = live.uid
        return session

    def _forget(self, key: Key) -> None:
        session = self.sessions.end(key)
        if session is not None:
            self.metrics.show_ready(session.ready, None)
            self.metrics.forget(key)

    def _stamp(self) -> str:
        return self.actor.now().strftime("%Y-%m-%dT%H:%M:%SZ")


def _is_just_made(found: Observation, result: ApplyResult, session: Session) -> bool:
    """Return whether a new PDCluster has its children now: its first status is written by the next
    reconcile, which follows at once and knows them.
    """
    is_whole = not (result.failures or result.conflict or result.events or result.cut)
    is_new = not (found.live.children or found.observed.status.get("conditions"))
    return is_new and session.needs_requeue and is_whole


def _is_quiet(found: Observation, plan: ClusterPlan, session: Session) -> bool:
    """Return whether a reconcile that has written nothing wants nothing either."""
    is_busy = plan.commands or plan.stale_records or plan.events or plan.needs_worker_records
    is_unsettled = session.needs_requeue or session.failures or found.observed.key_fault is not None
    return not (is_busy or is_unsettled)


def _earliest(*seconds: float | None) -> float | None:
    return min((each for each in seconds if each is not None), default=None)
