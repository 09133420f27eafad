"""Apply a plan: write what differs from it, and the statuses of scalers. Answers to our own writes
go into the cache at once; what they bring enqueues the cluster again.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ConflictError, UnsettledError
from pdcluster_api.apiserver.groups import Restarting
from pdcluster_api.apiserver.kinds import Kind, kind_name
from pdcluster_api.apiserver.observe import Live, group_restarts, set_workload, still_ending
from pdcluster_api.certificates.authority import StoredSecret
from pdcluster_api.certificates.rotation import RotationStep, carry_out, next_step
from pdcluster_api.manifests.objects import child_names
from pdcluster_api.manifests.render import Owner, RenderSettings, render_tls_secrets
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_api.plan.result import ClusterPlan, PlannedEvent
from pdcluster_api.rendering import Records, Rendering, record_lost
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.queue.work_queue import WriteGate
from pdcluster_operator.reconcile.etcd_requests import EtcdRequests
from pdcluster_operator.reconcile.lost_pods import Deleted
from pdcluster_operator.reconcile.observation import Observation, in_slices
from pdcluster_operator.reconcile.session import Fingerprint, Session, digest_of
from pdcluster_operator.reconcile.statuses import Statuses
from pdcluster_operator.writes.actions import Action, ObjectName
from pdcluster_operator.writes.apply import apply
from pdcluster_operator.writes.diff import compare
from pdcluster_operator.writes.drift import Manifest, writers
from pdcluster_schema import labels
from pdcluster_schema.conditions import APPLY_FAILED
from pdcluster_schema.workload import WorkloadId

CERTIFICATES = "Certificates"  # Reason of the events about a cluster's certificates


@dataclass(frozen=True)
class ApplyResult:
    requeue_after_seconds: float | None  # until the certificates are due for a check
    events: tuple[PlannedEvent, ...] = ()  # of certificates, and of workers that restart
    # refused writes, and objects that are not as they should be
    failures: tuple[WriteFailure, ...] = ()
    cut: tuple[str, ...] = ()  # pods that were removed before they had drained
    wrote: bool = False  # something was written, or tried to be
    changed: bool = False  # it was more than statuses
    # of an object that kept changing: the reconcile is done again
    conflict: ConflictError | None = None
    # no snapshots: a Secret is missing, and no event will come: try again
    missing_secret: bool = False

    def also(self, lost: Deleted) -> "ApplyResult":
        events, failures = (*self.events, *lost.events), (*self.failures, *lost.failures)
        wrote = self.wrote or bool(lost.events)
        return replace(self, events=events, failures=failures, wrote=wrote)

    @property
    def is_quiet(self) -> bool:
        """Return whether the children are as they should be, whatever statuses were written."""
        return not (self.changed or self.failures or self.conflict or self.missing_secret)


@dataclass
class PlanApplier:
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
        await session.etcd.command(found.target, plan.commands, plan.roles, plan.graces)
        now, fingerprint = self.now(), session.fingerprint
        if fingerprint is not None and fingerprint.holds(digest_of(found.live, plan), now):
            result = ApplyResult(fingerprint.requeue_after_seconds(now))
        else:
            if fingerprint is not None and now >= fingerprint.until:
                session.settled.clear()
            session.fingerprint = None
            result = await self._apply_objects(found, plan, session, now)
            after = self.statuses.after(found.live) if result.wrote else found.live
            if result.is_quiet and after is not None:
                seconds = result.requeue_after_seconds
                session.fingerprint = Fingerprint.of(after, plan, now, seconds)
        await session.etcd.remove(found.target, plan.stale_records)
        return result

    async def _apply_objects(
        self, found: Observation, plan: ClusterPlan, session: Session, now: datetime
    ) -> ApplyResult:
        live, cluster = found.live, found.cluster
        tls = tls_step(live, found.owner, now)
        ending, records = still_ending(live, now), await self._records(found, plan)
        sizes = {each.id: each.replicas for each in plan.workloads}
        restarts = {
            worker: each
            for worker, each in group_restarts(live, now).items()
            if worker.index < sizes.get(worker.workload, 0)  # others are removed
        }
        runs = {worker: each.run for worker, each in restarts.items()}
        rendering = Rendering(records, self.site, frozenset(ending), runs)
        manifests = [*tls.manifests, *await in_slices(rendering.manifests(plan))]
        unrenderable = rendering.unrenderable(plan)
        compared = compare(
            live.uid,
            manifests,
            live.children,
            rewrite=tls.rewrite,
            leave=[name for workload in unrenderable for name in objects_of(workload, live)],
            foreground=worker_sets(live) if plan.ends_first else (),
            settled=session.settled,
        )
        needed = [action for action in await in_slices(compared) if action is not None]
        actions, conflicting = session.write_conflicts.sift(needed, live.children)
        refused, conflict = await self._write(live, session, actions)
        is_tls_done = tls.reason and not (conflicting or refused or conflict)
        wrote, failed, scaler_conflict = await self.statuses.write_scalers(live, session, plan)
        lost = [record_lost(workload, cluster) for workload in unrenderable]
        failures = (*conflicting, *refused, *failed, *lost)
        waits = [tls.requeue_after_seconds, *ending.values(), *held(restarts.values())]
        begun = ((worker, each.last) for worker, each in restarts.items() if each.is_new)
        return ApplyResult(
            min((seconds for seconds in waits if seconds is not None), default=None),
            (
                *([PlannedEvent(CERTIFICATES, tls.reason)] if is_tls_done else ()),
                *(last.event(worker.leader) for worker, last in begun if last is not None),
            ),
            failures,
            tuple(gone(plan.cut, failures)),
            wrote=bool(actions) or wrote,
            changed=bool(actions),
            conflict=conflict or scaler_conflict,
            missing_secret=records.has_client_certificate is None,
        )

    async def _records(self, found: Observation, plan: ClusterPlan) -> Records:
        """Sources of snapshots; the etcd's Secret is read only when one is to be made."""
        image = self.site.worker_image_for(found.cluster.spec.engine.type)
        records = Records(found.cluster, found.live, found.owner, image)
        if found.target.tls_secret is None or not any(
            records.is_missing(workload.id) for workload in plan.workloads
        ):
            return records
        has_certificate = await self.etcd.has_client_certificate(found.target)
        return replace(records, has_client_certificate=has_certificate)

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
        bodies = {f"{kind_name(each)} {each['metadata']['name']}": each for each in live.children}
        return [_naming_writers(each, bodies.get(each.object)) for each in refused], conflict

    def _learn(self, session: Session, kind: Kind, body: Mapping[str, Any]) -> None:
        if self.cache.put(kind.name, body) is not None:
            session.needs_requeue = True


def held(restarts: Iterable[Restarting]) -> Iterator[float]:
    """Seconds until each worker that waits after crashes may start again."""
    for each in restarts:
        if each.is_stopped and each.wait_seconds is not None:
            yield each.wait_seconds


def objects_of(workload: WorkloadId, live: Live) -> list[ObjectName]:
    found = [each for kind in ("StatefulSet", "PodGroup") for each in live.own(kind).values()]
    return [
        *(
            ObjectName(kind_name(each), each["metadata"]["name"])
            for each in found
            if set_workload(each) == workload
        ),
        *(ObjectName(kind, workload.name) for kind in ("ControllerRevision", "ConfigMap")),
    ]


def worker_sets(live: Live) -> list[ObjectName]:
    """The StatefulSets of workers, which is not that of etcd."""
    return [
        ObjectName("StatefulSet", name)
        for name, body in live.own("StatefulSet").items()
        if set_workload(body)
    ]


def _naming_writers(failure: WriteFailure, body: Mapping[str, Any] | None) -> WriteFailure:
    names = ", ".join(writers(body)) if body and failure.reason == APPLY_FAILED else ""
    if not names:
        return failure
    which = f"{names} set fields of it, which may exclude ours"
    return replace(failure, message=f"{failure.message}; {which}")


def gone(pods: Iterable[str], failures: Iterable[WriteFailure]) -> list[str]:
    """Pods that were cut: those of a StatefulSet that could not be written were not."""
    refused = {failure.object for failure in failures}
    return [pod for pod in pods if f"StatefulSet {pod.rpartition('-')[0]}" not in refused]


@dataclass(frozen=True)
class TlsStep:
    """manifests: both Secrets when one is to be written; rewrite: existing ones."""

    manifests: Collection[Manifest] = ()
    rewrite: Collection[ObjectName] = ()
    reason: str = ""
    requeue_after_seconds: float | None = None


def tls_step(live: Live, owner: Owner, now: datetime) -> TlsStep:
    secrets, called = live.own("Secret"), child_names(live.key.name)
    names = [called.authority, called.certificates]
    if any("deletionTimestamp" in secrets[name]["metadata"] for name in names if name in secrets):
        # it can be made again when it is gone, and the other must not go ahead of it
        return TlsStep()
    ca, tls = (StoredSecret.of(secrets.get(name)) for name in names)
    requested = live.body["metadata"].get("annotations", {}).get(labels.ROTATE_CA)
    decision = next_step(ca, tls, now, requested)
    if decision.step is RotationStep.KEEP:
        return TlsStep(requeue_after_seconds=decision.requeue_after_seconds)
    made = carry_out(decision.step, ca, tls, now, requested)
    manifests = render_tls_secrets(
        owner,
        made.ca.data,
        made.tls.data,
        ca_annotations=made.ca.annotations,
        tls_annotations=made.tls.annotations,
    )
    # What is made at first must not replace Secrets that the cache has not seen yet.
    is_first = ca is None and tls is None
    rewrite = [] if is_first else [ObjectName("Secret", name) for name in names]
    reason = "" if is_first else decision.reason
    return TlsStep(manifests, rewrite, reason, decision.requeue_after_seconds)


def certificates_end(live: Live) -> datetime | None:
    """Time when the certificate that workers show ends; None = it cannot be read."""
    secret = live.own("Secret").get(child_names(live.key.name).certificates)
    stored = StoredSecret.of(secret)
    return stored.certificate_end if stored else None
