"""Reconcile one PDCluster: observe, plan, render, converge, write the status, post events.

Level-triggered: a reconcile starts from the observed state, whatever enqueued it, and
writes nothing for a cluster that is as it should be.  Of an invalid object only the
status is written; of one that is being deleted nothing.

The answers to our own writes go into the cache at once, so that the next reconcile
starts from them; the watch then brings nothing new.  Whatever a reconcile learns so
enqueues its cluster again.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pdcluster_operator.api import conditions
from pdcluster_operator.api.errors import InvalidObjectError
from pdcluster_operator.api.load import parse_stored
from pdcluster_operator.api.pdcluster import PDCluster
from pdcluster_operator.cluster.cache import Cache, Key, name_of
from pdcluster_operator.cluster.carry_out import carry_out
from pdcluster_operator.cluster.client import ApiClient
from pdcluster_operator.cluster.converge import Action, converge
from pdcluster_operator.cluster.errors import ClusterError, ConflictError, UnavailableError, UnsettledError, failure_of
from pdcluster_operator.cluster.events import Events
from pdcluster_operator.cluster.kinds import PDCLUSTER, POOL_SCALER, Kind
from pdcluster_operator.cluster.observe import Live, managed_etcd, observe, still_ending
from pdcluster_operator.cluster.status import write_status
from pdcluster_operator.manifests.render import Capabilities, Owner, Site
from pdcluster_operator.plan.cluster import plan_cluster, plan_invalid
from pdcluster_operator.plan.conditions import discovery_answers
from pdcluster_operator.plan.events import cut_short
from pdcluster_operator.plan.problem import Problem
from pdcluster_operator.plan.state import ClusterPlan, DiscoveryState, Event, Failure, Observed
from pdcluster_operator.reconcile.asking import Asking
from pdcluster_operator.reconcile.autoscaling import Autoscaling
from pdcluster_operator.reconcile.contested import Contested
from pdcluster_operator.reconcile.desired import Rendering, objects_of, record_lost, worker_sets
from pdcluster_operator.reconcile.discovery import Discovery, Question
from pdcluster_operator.reconcile.key_secret import KEY_SECRET_POLL_SECONDS, KeySecret
from pdcluster_operator.reconcile.pod_faults import PodFaults
from pdcluster_operator.reconcile.queue_runner import Done
from pdcluster_operator.reconcile.records import Records
from pdcluster_operator.reconcile.tls import tls_step
from pdcluster_operator.reconcile.worker_records import WorkerRecordsPoller, workers_question

logger = logging.getLogger(__name__)
CERTIFICATES = "Certificates"
"""Reason of the events about a cluster's certificates."""


@dataclass(frozen=True)
class _Made:
    """Result of writing the manifests.

    requeue_after_seconds: until the certificates are due for a check
    events:             of the certificates
    failures:           refused writes, and objects that are not as they should be
    wrote:              something was written, or tried to be
    conflict:           of an object that kept changing: the reconcile is done again
    """

    requeue_after_seconds: float | None
    events: tuple[Event, ...]
    failures: tuple[Failure, ...]
    wrote: bool
    conflict: ConflictError | None


@dataclass
class Reconciler:
    """Reconciles PDClusters; keeps the refused writes and the write fights of each in between.

    capabilities: which optional kinds exist now
    on_ready:     called with the status of a cluster's Ready condition; None = the cluster is gone
    on_cut:       called with the number of workers removed before they had drained
    now:          wall-clock time, in UTC
    _learnt:      clusters of which the running reconcile has learnt something that no event will
                  bring
    """

    client: ApiClient
    cache: Cache
    site: Site
    asking: Asking
    discovery: Discovery
    worker_records: WorkerRecordsPoller
    pod_faults: PodFaults
    key_secret: KeySecret
    events: Events
    capabilities: Callable[[], Capabilities]
    autoscaling: Autoscaling
    on_ready: Callable[[Key, str | None], None] = lambda key, ready: None
    on_cut: Callable[[Key, int], None] = lambda key, num_workers: None
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    contested: Contested = field(default_factory=Contested)
    _failures: dict[Key, tuple[Failure, ...]] = field(default_factory=dict)
    _learnt: set[Key] = field(default_factory=set)

    async def reconcile(self, key: Key) -> Done:
        """Reconcile once.  A transient failure is retried; an error of our own is raised."""
        live = self._live(key)
        if live is None or live.is_going:
            self._forget(key)
            return Done()
        self._learnt.discard(key)
        try:
            done = await self._reconcile_live(live)
        except (UnavailableError, ConflictError) as e:
            logger.warning("reconcile not finished key=%s error=%s", key, e)
            return Done(try_again=True, wrote=True)
        return replace(done, requeue_after_seconds=0.0, try_again=False) if key in self._learnt else done

    async def _reconcile_live(self, live: Live) -> Done:
        try:
            cluster, unknown = parse_stored(live.body)
        except InvalidObjectError as e:
            self.autoscaling.forget(live.key)
            observed = observe(live, discovery=DiscoveryState(managed=True), faults={})
            plan = plan_invalid(e.faults, observed, self._stamp())
            return Done(wrote=await self._report(live, plan.status, plan.events))
        if unknown:
            logger.warning("passed over fields of another version key=%s fields=%s", live.key, ",".join(unknown))
        return await self._converge(live, cluster)

    async def _converge(self, live: Live, cluster: PDCluster) -> Done:
        faults, requeue_after = await self.pod_faults.of(live)
        before = self._failures.get(live.key, ())
        discovery = await self._discovery(live, cluster, faults)
        key_fault = await self.key_secret.fault(live.key.namespace, cluster.spec.service.api_key_secret)
        outdated = Records(cluster, live, _owner(live), self.site.worker_image, has_client_certificate=None).outdated()

        self.autoscaling.follow(live.key, cluster.spec.autoscale)
        seen: Observed = observe(live, discovery=discovery, faults=faults, outdated=outdated, key_fault=key_fault)
        seen = replace(seen, decision=self.autoscaling.decide(live.key, cluster, seen))
        question = workers_question(cluster)
        is_up = discovery_answers(discovery)
        self.worker_records.follow(live.key, question, is_wanted=cluster.spec.roles.prefill is not None)
        seen = replace(seen, worker_records=self.worker_records.last(live.key, question, seen.workloads, is_up=is_up))

        def plan_with(failures: tuple[Failure, ...]) -> ClusterPlan:
            return plan_cluster(cluster, replace(seen, failures=failures), self._stamp())

        plan = plan_with(before)
        if plan.is_decision:  # recorded before anything follows it, so that the next reconcile knows it
            await self._report(live, plan.status, plan.events)
            return Done(requeue_after_seconds=0.0, wrote=True)
        if plan.needs_worker_records:
            seen = replace(seen, worker_records=await self.worker_records.fresh(live.key, question, seen.workloads))
            plan = plan_with(before)
        await self.worker_records.command(live.key, question, plan.commands)
        made = await self._carry_out(live, cluster, plan)
        await self.worker_records.remove(live.key, question, plan.ghosts)
        cut = gone(plan.cut, made.failures)
        self.on_cut(live.key, len(cut))
        if made.failures != before:
            self._failures[live.key] = made.failures
            plan = plan_with(made.failures)
        is_reported = await self._report(live, plan.status, (*plan.events, *cut_short(cut), *made.events))
        if made.conflict is not None:
            raise made.conflict
        asked_again = KEY_SECRET_POLL_SECONDS if key_fault else None
        found = (requeue_after, made.requeue_after_seconds, plan.requeue_after_seconds, asked_again)
        times = [seconds for seconds in found if seconds is not None]
        return Done(requeue_after_seconds=min(times, default=None), try_again=bool(made.failures), wrote=made.wrote or is_reported)

    async def _carry_out(self, live: Live, cluster: PDCluster, plan: ClusterPlan) -> _Made:
        """Make it so."""
        owner = _owner(live)
        tls = tls_step(live, owner, self.now())
        records = await self._records(live, cluster, plan, owner)
        ending = still_ending(live, self.now())
        rendering = Rendering(cluster, owner, self.site, self.capabilities(), records, frozenset(ending))
        manifests, stranded = [*tls.manifests, *rendering.manifests(plan)], rendering.stranded(plan)
        leave = [name for workload in stranded for name in objects_of(workload)]
        seen = worker_sets(live) if plan.ends_first else ()
        found = converge(live.uid, manifests, live.children, rewrite=tls.rewrite, leave=leave, foreground=seen)
        actions, fought = self.contested.sift(live.key, found, live.children)
        refused, conflict = await self._write(live.key, actions)
        events = (Event(CERTIFICATES, tls.reason),) if tls.reason and not (fought or refused or conflict) else ()
        written, unsaid, changed = await self._write_scalers(live, plan)
        lost = [record_lost(workload, cluster) for workload in stranded]
        failures = [*fought, *refused, *unsaid, *lost, *rendering.forbidden()]
        waits = [seconds for seconds in (tls.requeue_after_seconds, *ending.values()) if seconds is not None]
        return _Made(min(waits, default=None), events, tuple(failures), wrote=bool(actions) or written, conflict=conflict or changed)

    async def _write(self, key: Key, actions: list[Action]) -> tuple[list[Failure], ConflictError | None]:
        """Return the refused writes, and the conflict.

        Raises UnavailableError: the outcome is unknown then.
        """
        conflict = None
        try:
            refused = await carry_out(self.client, actions, partial(self._learn, key))
        except UnsettledError as e:
            refused, conflict = list(e.failures), e
        self.contested.written(actions, refused)
        return refused, conflict

    async def _records(self, live: Live, cluster: PDCluster, plan: ClusterPlan, owner: Owner) -> Records:
        """Sources of snapshots; the etcd's Secret is read only when one is to be made."""
        records = Records(cluster, live, owner, self.site.worker_image, has_client_certificate=False)
        question = Question.about(cluster.spec.discovery.etcd, live.key)
        if question.tls_secret is None or not any(records.is_missing(workload.id) for workload in plan.workloads):
            return records
        return replace(records, has_client_certificate=await self.asking.has_client_certificate(question))

    async def _write_scalers(self, live: Live, plan: ClusterPlan) -> tuple[bool, list[Failure], ConflictError | None]:
        """The status of the scalers that exist; one that was just made follows.

        Returns whether one was written, what was refused, and what would not hold still.
        """
        wrote, refused, conflict = False, list[Failure](), None
        bodies = {(body["spec"]["role"], body["spec"]["pool"]): body for body in live.own(POOL_SCALER.name).values()}
        for scaler in plan.scalers:
            body = bodies.get((scaler.role, scaler.pool))
            if body is None:
                continue
            try:
                wrote |= await self._write_status(live.key, POOL_SCALER, body, scaler.status)
            except UnavailableError:
                raise
            except ConflictError as e:
                wrote, conflict = True, e
            except ClusterError as e:
                refused.append(failure_of(e, f"status of PDPoolScaler {body['metadata']['name']}"))
                logger.warning("refused status object=%s namespace=%s error=%s", body["metadata"]["name"], live.key.namespace, e)
        return wrote, refused, conflict

    async def _write_status(self, key: Key, kind: Kind, body: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
        """Write a status that differs; returns whether it did.

        Raises ConflictError when it changed meanwhile.
        """
        if status == (body.get("status") or {}):
            return False
        metadata = body["metadata"]
        written = await write_status(self.client, kind, body, status)
        if written is not None:
            is_new = self.cache.put(kind.name, written) is not None
            if is_new and written["metadata"].get("generation") != metadata.get("generation"):  # the answer came before the event
                self._learnt.add(key)
            return True
        self._learnt.add(key)
        found = await self.client.find(kind, metadata["namespace"], metadata["name"])
        if found is None:  # the watch has not delivered that yet
            self.cache.forget(name_of(kind.name, body))
            return True
        self.cache.put(kind.name, found)
        raise ConflictError(f"{kind} {metadata['name']} is another one now, or is being changed")

    async def _report(self, live: Live, status: Mapping[str, Any], events: tuple[Event, ...]) -> bool:
        """Write the status if it changed, then the events; returns whether there was anything to
        write.
        """
        ready = next((each["status"] for each in status.get("conditions", ()) if each["type"] == conditions.READY), "Unknown")
        self.on_ready(live.key, ready)
        changed = await self._write_status(live.key, PDCLUSTER, live.body, status)
        if self.cache.get(PDCLUSTER.name, *live.key) is None:
            return changed
        posted = [await self.events.post(live.body, event) for event in events]
        return changed or any(posted)

    async def _discovery(self, live: Live, cluster: PDCluster, faults: Mapping[str, Problem]) -> DiscoveryState:
        etcd = cluster.spec.discovery.etcd
        if not etcd.endpoints:
            self.discovery.forget(live.key)
            return managed_etcd(live, f"{live.key.name}-etcd", etcd.replicas, faults)
        error = await self.discovery.error(live.key, Question.about(etcd, live.key))
        return DiscoveryState(managed=False, error=error)

    def _live(self, key: Key) -> Live | None:
        body = self.cache.get(PDCLUSTER.name, *key)
        return None if body is None else Live(body, self.cache.children(key))

    def _learn(self, key: Key, kind: Kind, body: Mapping[str, Any]) -> None:
        if self.cache.put(kind.name, body) is not None:
            self._learnt.add(key)

    def _forget(self, key: Key) -> None:
        self._failures.pop(key, None)
        self._learnt.discard(key)
        self.contested.forget(key)
        self.discovery.forget(key)
        self.worker_records.forget(key)
        self.pod_faults.forget(key)
        self.autoscaling.forget(key)
        self.on_ready(key, None)

    def _stamp(self) -> str:
        return self.now().strftime("%Y-%m-%dT%H:%M:%SZ")


def gone(pods: Iterable[str], failures: Iterable[Failure]) -> list[str]:
    """Pods of a cut whose StatefulSet could be written."""
    refused = {failure.object for failure in failures}
    return [pod for pod in pods if f"StatefulSet {pod.rpartition('-')[0]}" not in refused]


def _owner(live: Live) -> Owner:
    return Owner(live.key.name, live.key.namespace, live.uid)
