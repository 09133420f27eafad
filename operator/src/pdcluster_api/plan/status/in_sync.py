"""DiscoveryInSync: worker records against pods. Pure. Ghosts (records without a pod) and orphans
(ready pods without a record) count once they last; where most records have no pod, none is removed,
since the list of pods is more likely wrong.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdcluster_api.plan.observed.previous import Previous
from pdcluster_api.plan.observed.state import WorkerRecords, WorkloadState
from pdcluster_api.plan.status.condition import Condition
from pdcluster_schema import conditions as words

# Three leases: a lost worker has no record any more, and a restarted one has registered
MISMATCH_GRACE_SECONDS = 30.0

MISMATCH_POLL_SECONDS = 15.0


@dataclass(frozen=True)
class InSync:
    """condition: None = never known; stale_records: pods whose records may be removed."""

    condition: Condition | None
    stale_records: tuple[str, ...] = ()
    requeue_after_seconds: float | None = None


def stale_and_orphaned(
    states: Mapping[str, str], workloads: Iterable[WorkloadState]
) -> tuple[frozenset[str], frozenset[str]]:
    """(records without a pod, ready pods without a record), by pod."""
    pods = [pod for workload in workloads for pod in workload.pods]
    ready = {pod.name for pod in pods if pod.ready and not pod.terminating}
    return frozenset(states).difference(pod.name for pod in pods), frozenset(
        ready.difference(states)
    )


def find_mismatches(
    states: Mapping[str, str], workloads: Iterable[WorkloadState]
) -> frozenset[str]:
    """Records without a pod, and pods without a record whose worker has been ready before."""
    workloads = list(workloads)
    stale_records, orphans = stale_and_orphaned(states, workloads)
    started = {
        pod.name
        for workload in workloads
        for pod in workload.pods
        if pod.started and not pod.terminating
    }
    return stale_records | orphans | started.difference(states)


def in_sync(
    worker_records: WorkerRecords | None, workloads: Iterable[WorkloadState], previous: Previous
) -> InSync:
    """The condition; while etcd does not answer, as it was."""
    if worker_records is None or worker_records.error is not None:
        return InSync(
            Condition.kept(previous, words.DISCOVERY_IN_SYNC),
            requeue_after_seconds=None if worker_records is None else worker_records.again_seconds,
        )
    stale_records, orphans = (
        sorted(found) for found in stale_and_orphaned(worker_records.states, workloads)
    )
    requeue_after = MISMATCH_POLL_SECONDS if stale_records or orphans else None
    stale_records, orphans = (
        [pod for pod in found if worker_records.mismatched.get(pod, 0.0) >= MISMATCH_GRACE_SECONDS]
        for found in (stale_records, orphans)
    )
    if not stale_records and not orphans:
        message = "the records in etcd are those of the pods"
        return InSync(
            Condition.true(words.DISCOVERY_IN_SYNC, words.AS_DECLARED, message),
            (),
            requeue_after,
        )
    is_mass = len(stale_records) > 1 and 2 * len(stale_records) > len(worker_records.states)
    reason, texts = (
        (words.GHOSTS, _stale_text(stale_records, len(worker_records.states), is_mass=is_mass))
        if stale_records
        else (words.ORPHANS, [])
    )
    message = "; ".join([*texts, *_orphans_text(orphans)])
    condition = Condition.false(words.DISCOVERY_IN_SYNC, reason, message)
    return InSync(condition, () if is_mass else tuple(stale_records), requeue_after)


def _stale_text(stale_records: list[str], num_records: int, *, is_mass: bool) -> list[str]:
    if is_mass:
        fix = "none is removed, since so many do not vanish at once: see whether the pods are there"
        return [
            f"{len(stale_records)} of {num_records} records in etcd have no pod "
            f"({_names(stale_records)}); {fix}"
        ]
    return [f"records in etcd without a pod are removed: {_names(stale_records)}"]


def _orphans_text(orphans: list[str]) -> list[str]:
    return (
        [f"ready pods without a record in etcd, which no other worker finds: {_names(orphans)}"]
        if orphans
        else []
    )


def _names(pods: list[str]) -> str:
    return ", ".join(pods[:3]) + (f" and {len(pods) - 3} more" if len(pods) > 3 else "")
