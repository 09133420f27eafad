"""Reconcile one PDCluster: look, plan, act, report.

Level-triggered: a reconcile starts from the observed state, whatever enqueued it, and
writes nothing for a cluster that is as it should be.  Of an invalid object only the
status is written; of one that is being deleted nothing.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pdcluster_api.apiserver.body import Key
from pdcluster_api.apiserver.errors import ConflictError, UnavailableError
from pdcluster_api.apiserver.kinds import PDCLUSTER
from pdcluster_api.apiserver.observe import Live, observe
from pdcluster_api.errors import InvalidObjectError
from pdcluster_api.plan.cluster import plan_cluster, plan_invalid
from pdcluster_api.plan.observed.state import DiscoveryState
from pdcluster_api.plan.result import Event
from pdcluster_api.plan.status.events import cut_short
from pdcluster_api.plan.status.serving import serving_replicas
from pdcluster_api.schema import conditions
from pdcluster_api.schema.load import parse_stored
from pdcluster_api.schema.pdcluster import PDCluster
from pdcluster_operator.queue.runner import Done
from pdcluster_operator.reconcile.act import Actor
from pdcluster_operator.reconcile.key_secret import KeySecret
from pdcluster_operator.reconcile.look import look, look_closer
from pdcluster_operator.reconcile.metrics import LoopMetrics
from pdcluster_operator.reconcile.session import Session, Sessions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reconciler:
    """Reconciles PDClusters; what it remembers of one is in its session."""

    actor: Actor
    sessions: Sessions
    key_secret: KeySecret
    metrics: LoopMetrics

    async def reconcile(self, key: Key) -> Done:
        """Reconcile once.  A transient failure is retried; an error of our own is raised."""
        live = self._live(key)
        if live is None or live.is_going:
            self._forget(key)
            return Done()
        session = self._session(live)
        session.has_learnt = False
        try:
            done = await self._reconcile_live(live, session)
        except (UnavailableError, ConflictError) as e:
            logger.warning("reconcile not finished key=%s error=%s", key, e)
            return Done(try_again=True, wrote=True)
        return (
            replace(done, requeue_after_seconds=0.0, try_again=False)
            if session.has_learnt
            else done
        )

    async def _reconcile_live(self, live: Live, session: Session) -> Done:
        try:
            cluster = _parsed(live, session)
        except InvalidObjectError as e:
            session.autoscaling.stop()
            observed = observe(live, discovery=DiscoveryState(managed=True), faults={})
            plan = plan_invalid(e.faults, observed, self._stamp())
            return Done(wrote=await self._report(live, session, plan.status, plan.events))
        return await self._reconcile_valid(live, cluster, session)

    async def _reconcile_valid(self, live: Live, cluster: PDCluster, session: Session) -> Done:
        found = await look(live, cluster, session, self.key_secret)
        plan = plan_cluster(cluster, found.observed, self._stamp())
        # recorded before anything follows it, so that the next reconcile knows it
        if plan.is_decision:
            await self._report(live, session, plan.status, plan.events)
            return Done(requeue_after_seconds=0.0, wrote=True)
        if plan.needs_worker_records:
            found = await look_closer(found, session)
            plan = plan_cluster(cluster, found.observed, self._stamp())
        self.metrics.show_cluster(live.key, serving_replicas(cluster, plan), cluster.spec.qos.slo)
        acted = await self.actor.act(found, plan, session)
        self.metrics.drains_cut.labels(*live.key).inc(len(acted.cut))
        if acted.failures != session.failures:
            # in the status of this reconcile, and of the next ones
            session.failures = acted.failures
            plan = plan_cluster(
                cluster, replace(found.observed, failures=acted.failures), self._stamp()
            )
        events = (*plan.events, *cut_short(acted.cut), *acted.events)
        is_reported = await self._report(live, session, plan.status, events)
        if acted.conflict is not None:
            raise acted.conflict
        times = (
            found.requeue_after_seconds,
            acted.requeue_after_seconds,
            plan.requeue_after_seconds,
        )
        return Done(
            requeue_after_seconds=min(
                (seconds for seconds in times if seconds is not None), default=None
            ),
            try_again=bool(acted.failures),
            wrote=acted.wrote or is_reported,
        )

    async def _report(
        self, live: Live, session: Session, status: Mapping[str, Any], events: Iterable[Event]
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
        session.ready = ready
        return await self.actor.report(live, session, status, events)

    def _live(self, key: Key) -> Live | None:
        cache = self.actor.cache
        body = cache.get(PDCLUSTER.name, *key)
        return None if body is None else Live(body, cache.children(key))

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


def _parsed(live: Live, session: Session) -> PDCluster:
    """The object, parsed once a generation.  Raises InvalidObjectError."""
    version = live.uid, live.body["metadata"].get("generation", 0)
    if session.parsed is None or session.parsed[0] != version:
        session.parsed = None
        cluster, unknown = parse_stored(live.body)
        if unknown:
            logger.warning(
                "ignored fields of another version key=%s fields=%s", live.key, ",".join(unknown)
            )
        session.parsed = version, cluster
    return session.parsed[1]
