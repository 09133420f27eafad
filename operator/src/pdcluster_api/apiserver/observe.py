"""Turn cached bodies into the planner's input. Pure. Only children of this very PDCluster count, by
uid.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from pdcluster_api.apiserver.container_ends import refusal_of
from pdcluster_api.apiserver.kinds import Body, Key
from pdcluster_api.apiserver.pods import FOR_ETCD, ending_pod, pod_problem, pod_state
from pdcluster_api.plan.observed.state import (
    DiscoveryState,
    Observed,
    PodState,
    Problem,
    ScalerState,
    WorkloadState,
    WriteFailure,
)
from pdcluster_api.plan.status.condition import worst_of
from pdcluster_schema import labels
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import at_revision, template_hash, written_names
from pdcluster_schema.sections import ROUTER
from pdcluster_schema.workload import WorkloadId

# Characters of the annotation that asks for a verification; they are kept in the status
MAX_REQUEST = 64

# Time for a kubelet to report the end of a pod: it kills one at the end of its grace period, then
# it needs a moment to say so
LATE_SECONDS = 10.0


@dataclass(frozen=True)
class Live:
    """A PDCluster's body and the bodies of its children.

    One without labels is more than it may have, and nothing but its identity is known: it can only
    be removed.
    """

    body: Body
    children: Sequence[Body]
    _own: dict[str, dict[str, Body]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        own: defaultdict[str, dict[str, Body]] = defaultdict(dict)
        for child in self.children:
            if self.uid in owner_uids(child) and "labels" in child["metadata"]:
                own[child["kind"]][child["metadata"]["name"]] = child
        object.__setattr__(self, "_own", dict(own))

    @property
    def key(self) -> Key:
        return Key(self.body["metadata"]["namespace"], self.body["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])

    @property
    def is_going(self) -> bool:
        return "deletionTimestamp" in self.body["metadata"]

    def own(self, kind: str) -> dict[str, Body]:
        return self._own.get(kind, {})


def observe(
    live: Live,
    *,
    discovery: DiscoveryState,
    failures: Sequence[WriteFailure] = (),
    faults: Mapping[str, Problem],
    outdated: Collection[WorkloadId] = (),
    key_fault: Problem | None = None,
) -> Observed:
    """Observe one PDCluster.

    failures: writes that the API server refused in the last reconcile
    faults:   by StatefulSet, the problem that keeps it from getting pods
    outdated: workloads of a pool that was declared otherwise when they were made: as good as gone
    key_fault: problem of the API keys' Secret; None = there is a key, or no Secret is named
    """
    service = live.own("Service").get(live.key.name)
    selector = {} if service is None else service["spec"].get("selector", {})
    return Observed(
        generation=live.body["metadata"]["generation"],
        status=live.body.get("status", {}),
        discovery=discovery,
        workloads=[
            replace(state, gone=True) if state.id in outdated else state
            for state in _workloads(live, faults)
        ],
        records=sorted(
            {
                identity
                for body in live.own("ControllerRevision").values()
                if (identity := workload_of(body))
            }.difference(outdated)
        ),
        scalers=[_scaler(body) for body in live.own("PDPoolScaler").values()],
        service_revision=selector.get(labels.REVISION),
        service_role=selector.get(labels.ROLE),
        failures=failures,
        key_fault=key_fault,
        verify_request=_request(live),
        budgets={
            name: number
            for name, body in live.own("PodDisruptionBudget").items()
            if isinstance(number := body["spec"].get("minAvailable"), int)
        },
    )


def _request(live: Live) -> str:
    annotations = live.body["metadata"].get("annotations") or {}
    return str(annotations.get(labels.VERIFY, ""))[:MAX_REQUEST]


def managed_etcd(
    live: Live, name: str, desired: int, faults: Mapping[str, Problem]
) -> DiscoveryState:
    """The managed etcd, by the readiness of its pods, with the worst problem of the others.
    faults: by StatefulSet, the problem that keeps it from getting pods
    """
    body = live.own("Deployment").get(name) or live.own("StatefulSet").get(name, {})
    found = [
        problem
        for pod in live.children
        if _is_of_etcd(pod) and (problem := pod_problem(pod, FOR_ETCD))
    ]
    fault = faults.get(name) or refused_pods(body)
    if fault and is_short_of_pods(body):
        found.append(fault)
    return DiscoveryState(
        managed=True,
        ready=body.get("status", {}).get("readyReplicas", 0),
        desired=desired,
        problem=worst_of(found),
        ending=tuple(
            ending_pod(pod)
            for pod in live.children
            if _is_of_etcd(pod) and "deletionTimestamp" in pod["metadata"]
        ),
    )


def as_it_runs(cluster: PDCluster, live: Live) -> PDCluster:
    """The cluster under the revision whose workers are what its spec asks for, if any run.  An
    older operator's snapshots say so by their revision alone, which names the spec as written.
    """
    hashed = template_hash(cluster.spec)
    records = [
        (workload.revision, body["metadata"]["labels"].get(labels.TEMPLATE_HASH))
        for body in live.own("ControllerRevision").values()
        if (workload := workload_of(body)) and workload.role != ROUTER
    ]
    same = sorted(revision for revision, its_hash in records if its_hash == hashed)
    older = {revision for revision, its_hash in records if its_hash is None}
    named = (each for each in written_names(cluster.spec) if each in older)
    found = next(iter(same), None) or next(named, None)
    if found is None and written_names(cluster.spec)[0] in {revision for revision, _ in records}:
        found = hashed  # its own name is that of other pods
    return cluster if found is None else at_revision(cluster, found)


def workload_of(body: Mapping[str, Any]) -> WorkloadId | None:
    """Workload of a StatefulSet, snapshot or pod; None = of none, as etcd's."""
    found = body["metadata"].get("labels", {})
    try:
        return WorkloadId(
            found[labels.CLUSTER], found[labels.ROLE], found[labels.POOL], found[labels.REVISION]
        )
    except KeyError:
        return None


def still_ending(live: Live, now: datetime) -> dict[WorkloadId, float | None]:
    """Workloads without a StatefulSet that still have pods of an earlier one: a new one could not
    make its own.  With the seconds to wait for those, None = unknown. A pod that should have ended
    long ago, as of a lost node, holds nothing back: the pod of its name waits for it. The others
    need not, though Kubernetes makes them only after a pod of a lower ordinal that it could make:
    with the first one stuck it makes none. Pods that were orphaned on purpose have no owner, and
    are adopted.
    """
    sets = {workload_of(body) for body in live.own("StatefulSet").values()}
    lefts = {
        identity: [_seconds_left(pod, now) for pod in left]
        for identity, left in _pods_by_workload(live).items()
        if identity not in sets
    }
    return {
        identity: None
        if None in lasts
        else max(seconds for seconds in lasts if seconds is not None)
        for identity, lasts in lefts.items()
        if any(seconds is None or seconds > 0 for seconds in lasts)
    }


def _seconds_left(pod: Body, now: datetime) -> float | None:
    """Time until a pod counts as stuck in termination; None = it is not terminating."""
    should_be_gone = pod["metadata"].get("deletionTimestamp")  # its grace period included
    if should_be_gone is None:
        return None
    return (datetime.fromisoformat(should_be_gone) - now).total_seconds() + LATE_SECONDS


def ready_workers(
    live: Live, revision: str | None, draining: Collection[str] = ()
) -> list[tuple[WorkloadId, Body]]:
    """Pods of workers that are ready and do not end, of one revision; None = of all.  draining:
    pods that count too though they say that they are not ready any more
    """
    return [
        (identity, pod)
        for identity, pods in sorted(_pods_by_workload(live).items())
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))
        if revision in (None, identity.revision) and _is_at_work(pod_state(pod), draining)
    ]


def _is_at_work(pod: PodState, draining: Collection[str]) -> bool:
    return not pod.terminating and (pod.ready or (pod.started and pod.name in draining))


def refused_pods(deployment: Body) -> Problem | None:
    """Problem that keeps a Deployment from getting pods; None = there is none."""
    conditions = (deployment.get("status") or {}).get("conditions") or ()
    messages = (
        str(each.get("message") or "")
        for each in conditions
        if (each.get("type"), each.get("status")) == ("ReplicaFailure", "True")
    )
    return next(map(refusal_of, messages), None)


def is_short_of_pods(body: Mapping[str, Any]) -> bool:
    """True if a StatefulSet has too few pods; one that is being deleted gets none."""
    if "deletionTimestamp" in body["metadata"]:
        return False
    return int(body.get("status", {}).get("replicas", 0)) < int(body["spec"].get("replicas", 1))


def owner_uids(body: Mapping[str, Any]) -> list[str]:
    return [reference["uid"] for reference in body["metadata"].get("ownerReferences", ())]


def _is_of_etcd(body: Body) -> bool:
    marks: Mapping[str, str] = body["metadata"].get("labels", {})
    return body["kind"] == "Pod" and marks.get(labels.COMPONENT) == labels.ETCD


def _workloads(live: Live, faults: Mapping[str, Problem]) -> list[WorkloadState]:
    pods, recorded = _pods_by_workload(live), _recorded_pools(live)
    sets = {
        identity: body
        for body in live.own("StatefulSet").values()
        if (identity := workload_of(body))
    }
    states = [
        _workload(identity, sets[identity], faults.get(identity.name), pods.get(identity, []))
        if identity in sets
        else _remains(identity, pods[identity])
        for identity in sorted({*sets, *pods})
    ]
    return [_with_accelerators(state, recorded.get(state.id.name, {})) for state in states]


def _with_accelerators(state: WorkloadState, recorded: Mapping[str, Any]) -> WorkloadState:
    gpus, numbers = (pod.gpu for pod in state.pods), (pod.gpus_per_replica for pod in state.pods)
    number = recorded.get("gpusPerReplica")
    return replace(
        state,
        gpu=str(recorded.get("gpu", "")) or next(filter(None, gpus), ""),
        gpus_per_replica=number if isinstance(number, int) else next(filter(None, numbers), 0),
    )


def _recorded_pools(live: Live) -> dict[str, Mapping[str, Any]]:
    pools = {
        workload.name: (record.get("data") or {}).get("pool")
        for record in live.own("ControllerRevision").values()
        if (workload := workload_of(record))
    }
    return {name: pool for name, pool in pools.items() if isinstance(pool, Mapping)}


def _remains(identity: WorkloadId, pods: Sequence[Body]) -> WorkloadState:
    states = tuple(pod_state(pod) for pod in pods)
    return WorkloadState(
        identity, 0, len(states), sum(state.ready for state in states), 0, gone=True, pods=states
    )


def _workload(
    identity: WorkloadId, body: Body, fault: Problem | None, pods: Iterable[Body]
) -> WorkloadState:
    status = body.get("status", {})
    return WorkloadState(
        id=identity,
        desired=body["spec"].get("replicas", 1),
        current=status.get("replicas", 0),
        ready=status.get("readyReplicas", 0),
        updated=0 if _is_behind(body) else status.get("updatedReplicas", 0),
        gone="deletionTimestamp" in body["metadata"],
        fault=fault,
        pods=tuple(pod_state(pod) for pod in pods),
    )


def _is_behind(body: Body) -> bool:
    """Return whether a StatefulSet's status is of an earlier template, or size."""
    seen = body.get("status", {}).get("observedGeneration")
    return seen is not None and seen < body["metadata"].get("generation", 0)


def _pods_by_workload(live: Live) -> dict[WorkloadId, list[Body]]:
    """Pods by StatefulSet: they are its children, not the PDCluster's, and have our labels.  Labels
    can be copied: a pod without an owner, or of another controller, is not ours.
    """
    found: defaultdict[WorkloadId, list[Body]] = defaultdict(list)
    for body in live.children:
        identity = workload_of(body) if body["kind"] == "Pod" else None
        owners = {
            (reference["kind"], reference["name"])
            for reference in body["metadata"].get("ownerReferences", ())
        }
        # the one that is there, or an earlier one
        if identity is not None and ("StatefulSet", identity.name) in owners:
            found[identity].append(body)
    return found


def _scaler(body: Body) -> ScalerState:
    spec = body["spec"]
    seen = body["metadata"].get("annotations", {}).get(labels.SEEN_REPLICAS, "")
    return ScalerState(
        spec["role"],
        spec["pool"],
        spec["replicas"],
        int(seen) if seen.isdecimal() else None,
        _writer(body),
    )


def _writer(scaler: Body) -> str | None:
    entries = scaler["metadata"].get("managedFields") or ()
    names = (
        str(each.get("manager"))
        for each in entries
        if "f:replicas" in ((each.get("fieldsV1") or {}).get("f:spec") or {})
    )
    return next((name for name in names if name != labels.FIELD_MANAGER), None)
