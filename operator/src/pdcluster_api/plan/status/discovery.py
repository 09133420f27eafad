"""DiscoveryReady: etcd answers, has room, and has its members. DiscoveryInSync: worker records
against pods. Pure.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pdcluster_api.plan.observed.pools import node_lost
from pdcluster_api.plan.observed.state import (
    DiscoveryState,
    Previous,
    Problem,
    WorkerRecords,
    WorkloadState,
)
from pdcluster_api.plan.status.condition import Condition, worst_of
from pdcluster_schema import conditions as words


def discovery_answers(discovery: DiscoveryState) -> bool:
    return discovery.error is None and (
        not discovery.managed or discovery.ready >= discovery.desired // 2 + 1
    )


def discovery_condition(discovery: DiscoveryState, lost: Collection[str] = ()) -> Condition:
    """An etcd that only just starts is not yet one that cannot be reached."""
    kind = words.DISCOVERY_READY
    members = f"{discovery.ready} of {discovery.desired} etcd members are ready"
    if discovery.is_full and discovery_answers(discovery):
        return Condition.false(kind, words.ETCD_FULL, _full(discovery))
    if discovery.managed and discovery.ready < discovery.desired:
        reason, problem = _problem(discovery, lost) or (words.STARTING, discovery.error)
        answers = "it answers all the same" if discovery_answers(discovery) else None
        message = "; ".join(part for part in (members, problem, answers) if part)
        return Condition.false(kind, reason, message)
    if discovery.error is not None:
        message = (
            f"{discovery.error}; workers that know each other go on, new ones wait until it answers"
        )
        return Condition.false(kind, words.ETCD_UNREACHABLE, message)
    message = members if discovery.managed else "etcd answers"
    return Condition.true(kind, words.ETCD_ANSWERS, message)


def _problem(discovery: DiscoveryState, lost: Collection[str]) -> Problem | None:
    """Cause for which a member that we run is not ready; None = it is just starting."""
    lost_nodes = node_lost(pod for pod in discovery.ending if pod.name in lost)
    worst = worst_of([discovery.problem, lost_nodes])
    if worst is not None or not discovery.ending:
        return worst
    return Problem(words.STARTING, f"{min(map(str, discovery.ending))} is still ending")


def _full(discovery: DiscoveryState) -> str:
    if discovery.in_memory:
        fix = "delete its pod: workers register again in the next one"
    elif discovery.managed:
        inside = "kubectl exec POD -c etcd -- etcdctl"
        fix = f"of each member `{inside} defrag`, then `{inside} alarm disarm`"
    else:
        fix = "remove keys that are not needed, then `etcdctl compact`, `defrag` and `alarm disarm`"
    return (
        "etcd has no room (alarm NOSPACE), so no worker can register and none can be drained; "
        f"workers that know each other go on; {fix}"
    )


# Three leases: a lost worker has no record any more, and a restarted one has registered
MISMATCH_GRACE_SECONDS = 30.0

MISMATCH_POLL_SECONDS = 15.0


@dataclass(frozen=True)
class InSync:
    """condition: None = never known; stale_records: pods whose records may be removed."""

    condition: Condition | None
    stale_records: tuple[str, ...] = ()
    requeue_after_seconds: float | None = None


def _stale_and_orphaned(
    states: Mapping[str, str], workloads: Iterable[WorkloadState]
) -> tuple[frozenset[str], frozenset[str]]:
    """(records without a pod, ready pods without a record), by pod."""
    pods = [pod for workload in workloads for pod in workload.pods]
    ready = frozenset(pod.name for pod in pods if pod.ready and not pod.terminating)
    return frozenset(states).difference(pod.name for pod in pods), ready.difference(states)


def find_mismatches(
    states: Mapping[str, str], workloads: Iterable[WorkloadState]
) -> frozenset[str]:
    """Records without a pod, and pods without a record whose worker has been ready before."""
    workloads = list(workloads)
    pods = (pod for workload in workloads for pod in workload.pods)
    started = {pod.name for pod in pods if pod.started and not pod.terminating}
    stale_records, orphans = _stale_and_orphaned(states, workloads)
    return stale_records | orphans | started.difference(states)


def in_sync(
    worker_records: WorkerRecords | None, workloads: Iterable[WorkloadState], previous: Previous
) -> InSync:
    """The condition; while etcd does not answer, as it was. Records without a pod and pods without
    a record count once they last; where most records have no pod, none is removed, since the list
    of pods is more likely wrong.
    """
    kind = words.DISCOVERY_IN_SYNC
    if worker_records is None or worker_records.error is not None:
        again_seconds = None if worker_records is None else worker_records.again_seconds
        return InSync(Condition.kept(previous, kind), requeue_after_seconds=again_seconds)
    num_records = len(worker_records.states)
    mismatches = _stale_and_orphaned(worker_records.states, workloads)
    requeue_after = MISMATCH_POLL_SECONDS if any(mismatches) else None
    stale_records, orphans = (
        [
            pod
            for pod in sorted(found)
            if worker_records.mismatched.get(pod, 0.0) >= MISMATCH_GRACE_SECONDS
        ]
        for found in mismatches
    )
    if not stale_records and not orphans:
        message = "the records in etcd are those of the pods"
        return InSync(Condition.true(kind, words.AS_DECLARED, message), (), requeue_after)
    is_mass = len(stale_records) > 1 and 2 * len(stale_records) > num_records
    texts = []
    if is_mass:
        texts.append(
            f"{len(stale_records)} of {num_records} records in etcd have no pod "
            f"({_names(stale_records)}); none is removed, since so many do not vanish at once: see "
            "whether the pods are there"
        )
    elif stale_records:
        texts.append(f"records in etcd without a pod are removed: {_names(stale_records)}")
    if orphans:
        which = "ready pods without a record in etcd, which no other worker finds"
        texts.append(f"{which}: {_names(orphans)}")
    reason = words.GHOSTS if stale_records else words.ORPHANS
    condition = Condition.false(kind, reason, "; ".join(texts))
    return InSync(condition, () if is_mass else tuple(stale_records), requeue_after)


def _names(pods: list[str]) -> str:
    return ", ".join(pods[:3]) + (f" and {len(pods) - 3} more" if len(pods) > 3 else "")
