"""Apply a plan: write what differs from it, and the statuses of scalers. Answers to our own writes
go into the cache at once; what they bring enqueues the cluster again.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ConflictError, UnsettledError
from pdcluster_api.apiserver.kinds import Kind
from pdcluster_api.apiserver.observe import Live, still_ending
from pdcluster_api.manifests.render import RenderSettings
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_api.plan.result import ClusterPlan, PlannedEvent
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.queue.runner import WriteGate
from pdcluster_operator.reconcile.etcd_requests import EtcdRequests
from pdcluster_operator.reconcile.fingerprint import Fingerprint, digest_of
from pdcluster_operator.reconcile.observation import Observation, in_slices, owner_of
from pdcluster_operator.reconcile.records import Records, Snapshots
from pdcluster_operator.reconcile.rendering import Rendering, objects_of, record_lost, worker_sets
from pdcluster_operator.reconcile.session import Session
from pdcluster_operator.reconcile.statuses import Statuses
from pdcluster_operator.reconcile.tls import tls_step
from pdcluster_operator.writes.actions import Action
from pdcluster_operator.writes.apply import apply
from pdcluster_operator.writes.diff import compare
from pdcluster_operator.writes.drift import writers
from pdcluster_schema.conditions import APPLY_FAILED

logger = logging.getLogger(__name__)
CERTIFICATES = "Certificates"  # Reason of the events about a cluster's certificates


@dataclass(frozen=True)
class ApplyResult:
    """Result of acting on a plan."""

    requeue_after_seconds: float | None  # until the certificates are due for a check
    events: tuple[PlannedEvent, ...] = ()  # of the certificates
    # refused writes, and objects that are not as they should be
    failures: tuple[WriteFailure, ...] = ()
    cut: tuple[str, ...] = ()  # pods that were removed before they had drained
    wrote: bool = False  # something was written, or tried to be
    changed: bool = False  # it was more than statuses
    # of an object that kept changing: the reconcile is done again
    conflict: ConflictError | None = None
    # no snapshots: a Secret is missing, and no event will come: try again
    missing_secret: bool = False


@dataclass
class PlanApplier:
    """Writes for all PDClusters."""

    client: ApiClient
    cache: Cache
    site: RenderSettings
    etcd: EtcdRequests
    now: Callable[[], datetime] = lambda: datetime.now(UTC)  # wall-clock time, in UTC
    # of another reconcile, closed while objects are written
    gate: WriteGate = field(default_factory=WriteGate)
    statuses: Statuses = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.statuses = Statuses(self.client, self.cache)

    async def apply(self, found: Observation, plan: ClusterPlan, session: Session) -> ApplyResult:
        """Make it so: drain commands before a shrink, objects, then records of lost workers.
        Raises UnavailableError: the outcome is unknown then.
        """
        await session.etcd.command(found.target, plan.commands)
        now, fingerprint = self.now(), session.fingerprint
        if fingerprint is not None and fingerprint.holds(digest_of(found.live, plan), now):
            result = ApplyResult(fingerprint.requeue_after_seconds(now))
        else:
            session.fingerprint = None
            result = await self._apply_objects(found, plan, session, now)
            if not (result.changed or result.failures or result.conflict or result.missing_secret):
                # the children are as they should be, whatever statuses were written beside that
                after = self.statuses.after(found.live) if result.wrote else found.live
                if after is not None:
                    seconds = result.requeue_after_seconds
                    session.fingerprint = Fingerprint.of(after, plan, now, seconds)
        await session.etcd.remove(found.target, plan.stale_records)
        return result

    async def _apply_objects(
        self, found: Observation, plan: ClusterPlan, session: Session, now: datetime
    ) -> ApplyResult:
        live, cluster, owner = found.live, found.cluster, owner_of(found.live)
        tls = tls_step(live, owner, now)
        ending, records = still_ending(live, now), await self._records(found, plan)
        rendering = Rendering(cluster, owner, self.site, records, frozenset(ending))
        manifests = [*tls.manifests, *await in_slices(rendering.manifests(plan))]
        unrenderable = rendering.unrenderable(plan)
        leave = [name for workload in unrenderable for name in objects_of(workload)]
        foreground = worker_sets(live) if plan.ends_first else ()
        compared = compare(
            live.uid,
            manifests,
            live.children,
            rewrite=tls.rewrite,
            leave=leave,
            foreground=foreground,
        )
        needed = [action for action in await in_slices(compared) if action is not None]
        actions, conflicting = session.write_conflicts.sift(needed, live.children)
        refused, conflict = await self._write(live, session, actions)
        events = (
            (PlannedEvent(CERTIFICATES, tls.reason),)
            if tls.reason and not (conflicting or refused or conflict)
            else ()
        )
        scalers = await self.statuses.write_scalers(live, session, plan)
        lost = [record_lost(workload, cluster) for workload in unrenderable]
        failures = (*conflicting, *refused, *scalers.failures, *lost)
        waits = [
            seconds
            for seconds in (tls.requeue_after_seconds, *ending.values())
            if seconds is not None
        ]
        cut, missing_secret = (
            tuple(gone(plan.cut, failures)),
            records.has_client_certificate is None,
        )
        return ApplyResult(
            min(waits, default=None),
            events,
            failures,
            cut,
            bool(actions) or scalers.wrote,
            bool(actions),
            conflict or scalers.conflict,
            missing_secret,
        )

    async def _records(self, found: Observation, plan: ClusterPlan) -> Records:
        """Sources of snapshots; the etcd's Secret is read only when one is to be made."""
        live, cluster, owner = found.live, found.cluster, owner_of(found.live)
        snapshots = Snapshots(cluster, live, owner)
        is_needed = found.target.tls_secret is not None and any(
            snapshots.is_missing(workload.id) for workload in plan.workloads
        )
        has_certificate = (
            await self.etcd.has_client_certificate(found.target) if is_needed else False
        )
        image = self.site.worker_image_for(cluster.spec.engine.type)
        return Records(cluster, live, owner, image, has_certificate)

    async def _write(
        self, live: Live, session: Session, actions: list[Action]
    ) -> tuple[list[WriteFailure], ConflictError | None]:
        conflict = None
        try:
            with self.gate.closed():
                refused = await apply(self.client, actions, partial(self._learn, session))
        except UnsettledError as e:
            refused, conflict = list(e.failures), e
        session.write_conflicts.written(actions, refused)
        return [_naming_writers(failure, live.children) for failure in refused], conflict

    def _learn(self, session: Session, kind: Kind, body: Mapping[str, Any]) -> None:
        if self.cache.put(kind.name, body) is not None:
            session.needs_requeue = True


def _naming_writers(failure: WriteFailure, children: Iterable[Mapping[str, Any]]) -> WriteFailure:
    body = next(
        (
            each
            for each in children
            if f"{each['kind']} {each['metadata']['name']}" == failure.object
        ),
        None,
    )
    names = ", ".join(writers(body)) if body is not None and failure.reason == APPLY_FAILED else ""
    return (
        replace(
            failure, message=f"{failure.message}; {names} set fields of it, which may exclude ours"
        )
        if names
        else failure
    )


def gone(pods: Iterable[str], failures: Iterable[WriteFailure]) -> list[str]:
    refused = {failure.object for failure in failures}
    return [pod for pod in pods if f"StatefulSet {pod.rpartition('-')[0]}" not in refused]
