"""One pass over one PDCluster: observe, plan, render, converge, write the status, post events.

Level-triggered: a pass starts from what is, whatever made it due, and a pass
over a cluster that is as it should be writes nothing.  An object that is
refused, or being deleted, has nothing touched but its status, or nothing.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from pdcluster_operator.api import conditions
from pdcluster_operator.api.errors import InvalidObjectError
from pdcluster_operator.api.load import parse
from pdcluster_operator.api.pdcluster import PDCluster
from pdcluster_operator.cluster.cache import Cache, Key, Name
from pdcluster_operator.cluster.carry_out import carry_out
from pdcluster_operator.cluster.client import ApiClient
from pdcluster_operator.cluster.converge import converge
from pdcluster_operator.cluster.errors import ConflictError, UnavailableError
from pdcluster_operator.cluster.events import Events
from pdcluster_operator.cluster.kinds import PDCLUSTER, POOL_SCALER, Kind
from pdcluster_operator.cluster.observe import Live, managed_etcd, observe
from pdcluster_operator.cluster.status import write_status
from pdcluster_operator.manifests.render import Capabilities, Owner, Site
from pdcluster_operator.plan.cluster import plan_cluster, plan_invalid
from pdcluster_operator.plan.state import ClusterPlan, DiscoveryState, Failure, Happening, Observed
from pdcluster_operator.reconcile.asking import Asking
from pdcluster_operator.reconcile.desired import Rendering
from pdcluster_operator.reconcile.discovery import Discovery, Question
from pdcluster_operator.reconcile.pod_faults import PodFaults
from pdcluster_operator.reconcile.records import Records
from pdcluster_operator.reconcile.tls import tls_step
from pdcluster_operator.reconcile.workers import Done

logger = logging.getLogger(__name__)
CERTIFICATES = "Certificates"
"""Reason of the events about a cluster's certificates."""


@dataclass
class Reconciler:
    """Carries out passes; what it remembers of a cluster between them is only what the API server refused.

    capabilities: which optional kinds exist now
    on_ready:     told of the status of a cluster's Ready condition; None = the cluster is gone
    now:          wall-clock time, in UTC
    """

    client: ApiClient
    cache: Cache
    site: Site
    asking: Asking
    discovery: Discovery
    pod_faults: PodFaults
    events: Events
    capabilities: Callable[[], Capabilities]
    on_ready: Callable[[Key, str | None], None] = lambda key, ready: None
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _failures: dict[Key, tuple[Failure, ...]] = field(default_factory=dict)

    async def reconcile(self, key: Key) -> Done:
        """One pass.  What passes by itself is tried again; a fault of our own is raised."""
        live = self._live(key)
        if live is None or live.is_going:
            self._forget(key)
            return Done()
        try:
            return await self._pass(live)
        except (UnavailableError, ConflictError) as e:
            logger.warning("pass not finished key=%s error=%s", key, e)
            return Done(try_again=True)

    async def _pass(self, live: Live) -> Done:
        try:
            cluster = parse(live.body)
        except InvalidObjectError as e:
            observed = observe(live, discovery=DiscoveryState(managed=True), faults={})
            plan = plan_invalid(e.faults, observed, self._stamp())
            await self._tell(live, plan.status, plan.happenings)
            return Done()
        return await self._converge(live, cluster)

    async def _converge(self, live: Live, cluster: PDCluster) -> Done:
        faults, look_again = await self.pod_faults.of(live)
        before = self._failures.get(live.key, ())
        discovery = await self._discovery(live, cluster)

        def plan_with(failures: tuple[Failure, ...]) -> ClusterPlan:
            observed: Observed = observe(live, discovery=discovery, failures=failures, faults=faults)
            return plan_cluster(cluster, observed, self._stamp())

        plan = plan_with(before)
        tls_look_again, tls_news, failures = await self._carry_out(live, cluster, plan)
        if failures != before:
            self._failures[live.key] = failures
            plan = plan_with(failures)
        await self._tell(live, plan.status, (*plan.happenings, *tls_news))
        times = [seconds for seconds in (look_again, tls_look_again, plan.look_again_seconds) if seconds is not None]
        return Done(look_again_seconds=min(times, default=None), try_again=bool(failures))

    async def _carry_out(
        self, live: Live, cluster: PDCluster, plan: ClusterPlan
    ) -> tuple[float | None, tuple[Happening, ...], tuple[Failure, ...]]:
        """Make it so; returns when the certificates are to be looked at again, news of them, and what was refused."""
        owner = Owner(live.key.name, live.key.namespace, live.uid)
        tls = tls_step(live, owner, self.now())
        records = await self._records(live, cluster, plan, owner)
        rendering = Rendering(cluster, owner, self.site, self.capabilities(), records)
        manifests = [*tls.manifests, *rendering.manifests(plan)]
        actions = converge(live.uid, manifests, live.children, rewrite=tls.rewrite)
        failures = await carry_out(self.client, actions, self._learn)
        await self._write_scalers(live, plan)
        news = (Happening(CERTIFICATES, tls.reason),) if tls.reason and not failures else ()
        return tls.look_again_seconds, news, tuple(failures)

    async def _records(self, live: Live, cluster: PDCluster, plan: ClusterPlan, owner: Owner) -> Records:
        """What records are made from; the etcd's Secret is read only when one is to be made."""
        records = Records(cluster, live, owner, self.site.worker_image, has_client_certificate=False)
        question = Question.about(cluster.spec.discovery.etcd, live.key.namespace)
        if question.tls_secret is None or not any(records.is_missing(workload.id) for workload in plan.workloads):
            return records
        return replace(records, has_client_certificate=await self.asking.has_client_certificate(question))

    async def _write_scalers(self, live: Live, plan: ClusterPlan) -> None:
        """The status of the scalers that exist; one that was just made follows with its own event."""
        bodies = {(body["spec"]["role"], body["spec"]["pool"]): body for body in live.own(POOL_SCALER.name).values()}
        for scaler in plan.scalers:
            body = bodies.get((scaler.role, scaler.pool))
            if body is not None:
                written = await write_status(self.client, POOL_SCALER, body, scaler.status)
                if written is not None:
                    self._learn(POOL_SCALER, written)

    async def _tell(self, live: Live, status: Mapping[str, Any], happenings: tuple[Happening, ...]) -> None:
        """Write the status if it changed, then the events."""
        ready = next((each["status"] for each in status.get("conditions", ()) if each["type"] == conditions.READY), "Unknown")
        self.on_ready(live.key, ready)
        if status != live.body.get("status", {}):
            written = await write_status(self.client, PDCLUSTER, live.body, status)
            if written is None:  # gone, and the watch has not told of it
                self.cache.forget(Name(PDCLUSTER.name, *live.key))
                return
            self._learn(PDCLUSTER, written)
        for happening in happenings:
            await self.events.post(live.body, happening)

    async def _discovery(self, live: Live, cluster: PDCluster) -> DiscoveryState:
        etcd = cluster.spec.discovery.etcd
        if not etcd.endpoints:
            self.discovery.forget(live.key)
            return managed_etcd(live, f"{live.key.name}-etcd", etcd.replicas)
        error = await self.discovery.error(live.key, Question.about(etcd, live.key.namespace))
        return DiscoveryState(managed=False, error=error)

    def _live(self, key: Key) -> Live | None:
        body = self.cache.get(PDCLUSTER.name, *key)
        return None if body is None else Live(body, self.cache.children(key))

    def _learn(self, kind: Kind, body: Mapping[str, Any]) -> None:
        self.cache.put(kind.name, body)

    def _forget(self, key: Key) -> None:
        self._failures.pop(key, None)
        self.discovery.forget(key)
        self.pod_faults.forget(key)
        self.on_ready(key, None)

    def _stamp(self) -> str:
        return self.now().strftime("%Y-%m-%dT%H:%M:%SZ")
