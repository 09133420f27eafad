"""Compare worker records and pods: the condition DiscoveryInSync, and the records that may be
removed.

Pure.  A ghost is a record without its pod: its worker is gone without having
removed it, or runs on a node that Kubernetes has given up.  An orphan is a ready
pod without a record, which no peer finds.  Both are ordinary for the moment in
which a worker comes or goes, so only those count that stay.  When most records
are without a pod at once, the list of pods is more likely wrong than the
records: then none is removed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdcluster_api.plan.observed.previous import Previous
from pdcluster_api.plan.observed.state import WorkerRecords, WorkloadState
from pdcluster_api.plan.status.condition import Condition
from pdcluster_api.schema import conditions as words

MISMATCH_GRACE_SECONDS = 30.0
"""Three leases: a lost worker has no record any more, and a restarted one has registered."""

MISMATCH_POLL_SECONDS = 15.0


@dataclass(frozen=True)
class InSync:
    """condition: None = nothing has ever been known; ghosts: pods whose records may be removed."""

    condition: Condition | None
    ghosts: tuple[str, ...] = ()
    requeue_after_seconds: float | None = None


def ghosts_and_orphans(
    states: Mapping[str, str], workloads: Iterable[WorkloadState]
) -> tuple[frozenset[str], frozenset[str]]:
    """(records without a pod, ready pods without a record), by pod.

    states: of the registered workers.
    """
    pods = [pod for workload in workloads for pod in workload.pods]
    ready = {pod.name for pod in pods if pod.ready and not pod.terminating}
    return frozenset(states).difference(pod.name for pod in pods), frozenset(
        ready.difference(states)
    )


def odd_ones(states: Mapping[str, str], workloads: Iterable[WorkloadState]) -> frozenset[str]:
    """Records without a pod, and pods without a record whose worker has been ready before."""
    workloads = list(workloads)
    ghosts, orphans = ghosts_and_orphans(states, workloads)
    started = {
        pod.name
        for workload in workloads
        for pod in workload.pods
        if pod.started and not pod.terminating
    }
    return ghosts | orphans | started.difference(states)


def in_sync(
    worker_records: WorkerRecords | None, workloads: Iterable[WorkloadState], previous: Previous
) -> InSync:
    """The condition; while etcd does not answer, as it was."""
    if worker_records is None or worker_records.error is not None:
        return InSync(
            _as_it_was(previous),
            requeue_after_seconds=None if worker_records is None else worker_records.again_seconds,
        )
    ghosts, orphans = (
        sorted(found) for found in ghosts_and_orphans(worker_records.states, workloads)
    )
    requeue_after = MISMATCH_POLL_SECONDS if ghosts or orphans else None
    ghosts, orphans = (
        [pod for pod in found if worker_records.odd.get(pod, 0.0) >= MISMATCH_GRACE_SECONDS]
        for found in (ghosts, orphans)
    )
    if not ghosts and not orphans:
        message = "the records in etcd are those of the pods"
        return InSync(
            Condition(
                words.DISCOVERY_IN_SYNC, is_true=True, reason=words.AS_DECLARED, message=message
            ),
            (),
            requeue_after,
        )
    is_mass = len(ghosts) > 1 and 2 * len(ghosts) > len(worker_records.states)
    reason, said = (
        (words.GHOSTS, _of_ghosts(ghosts, len(worker_records.states), is_mass=is_mass))
        if ghosts
        else (words.ORPHANS, [])
    )
    message = "; ".join([*said, *_of_orphans(orphans)])
    condition = Condition(words.DISCOVERY_IN_SYNC, is_true=False, reason=reason, message=message)
    return InSync(condition, () if is_mass else tuple(ghosts), requeue_after)


def _as_it_was(previous: Previous) -> Condition | None:
    before = previous.condition(words.DISCOVERY_IN_SYNC)
    reason, message = before.get("reason"), before.get("message")
    if not isinstance(reason, str) or not isinstance(message, str):
        return None
    return Condition(
        words.DISCOVERY_IN_SYNC, previous.is_true(words.DISCOVERY_IN_SYNC), reason, message
    )


def _of_ghosts(ghosts: list[str], num_records: int, *, is_mass: bool) -> list[str]:
    if is_mass:
        fix = "none is removed, since so many do not vanish at once: see whether the pods are there"
        return [
            f"{len(ghosts)} of {num_records} records in etcd have no pod ({_names(ghosts)}); {fix}"
        ]
    return [f"records in etcd without a pod are removed: {_names(ghosts)}"]


def _of_orphans(orphans: list[str]) -> list[str]:
    return (
        [f"ready pods without a record in etcd, which no other worker finds: {_names(orphans)}"]
        if orphans
        else []
    )


def _names(pods: list[str]) -> str:
    return ", ".join(pods[:3]) + (f" and {len(pods) - 3} more" if len(pods) > 3 else "")
