"""Turn cached bodies into the planner's input. Pure. Only children of this very PDCluster count, by
uid.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from math import inf
from typing import Any

from pdcluster_api.apiserver.container_ends import refusal_of
from pdcluster_api.apiserver.groups import Restarting, WorkerPods, group_of, groups_of
from pdcluster_api.apiserver.kinds import Body, Key
from pdcluster_api.apiserver.pods import FOR_ETCD, ending_pod, pod_problem, pod_state
from pdcluster_api.manifests.groups import workers_of_budget
from pdcluster_api.manifests.render import pods_of_record
from pdcluster_api.plan.observed.state import (
    DiscoveryState,
    Observed,
    PodState,
    Previous,
    Problem,
    ScalerState,
    WorkloadState,
    WriteFailure,
)
from pdcluster_api.plan.status.condition import worst_of
from pdcluster_schema import labels
from pdcluster_schema.workload import GroupId, WorkloadId

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

    @cached_property
    def groups(self) -> dict[WorkloadId, list[WorkerPods]]:
        """Workers of several pods, by their workload and in their order."""
        pods = (body for body in self.children if body["kind"] == "Pod")
        return groups_of(self.own("StatefulSet").values(), pods)

    def own(self, kind: str) -> dict[str, Body]:
        return self._own.get(kind, {})

    def records(self) -> list[tuple[WorkloadId, Body]]:
        found = ((workload_of(body), body) for body in self.own("ControllerRevision").values())
        return [(workload, body) for workload, body in found if workload is not None]

    @cached_property
    def retired(self) -> set[WorkloadId]:
        """Workloads of which the snapshot alone is kept."""
        marks = [(each, is_retired(body)) for each, body in self.records()]
        return {each for each, _ in marks} - {each for each, is_so in marks if not is_so}


def observe(
    live: Live,
    *,
    discovery: DiscoveryState,
    failures: Sequence[WriteFailure] = (),
    faults: Mapping[str, Problem],
    outdated: Collection[WorkloadId] = (),
    key_fault: Problem | None = None,
) -> Observed:
    """faults: by StatefulSet, the problem that keeps it from getting pods
    outdated: workloads of a pool that was declared otherwise when they were made: as good as gone
    key_fault: problem of the API keys' Secret; None = there is a key, or no Secret is named
    """
    service = live.own("Service").get(live.key.name, {})
    selector = service.get("spec", {}).get("selector", {})
    is_wide = labels.ROLE in selector and labels.REVISION not in selector
    serving = Previous(live.body.get("status", {})).text("servingRevision")
    annotations = live.body["metadata"].get("annotations") or {}
    recorded = {identity for identity, _ in live.records()}.difference(outdated)
    retired = live.retired & recorded
    pods = {workload.name: pods_of_record(record) for workload, record in live.records()}
    return Observed(
        generation=live.body["metadata"]["generation"],
        status=live.body.get("status", {}),
        discovery=discovery,
        workloads=[
            replace(state, gone=True) if state.id in outdated else state
            for state in _workloads(live, faults)
        ],
        records=sorted(recorded - retired),
        retired=sorted(retired),
        scalers=[_scaler(body) for body in live.own("PDPoolScaler").values()],
        service_revision=selector.get(labels.REVISION) or (serving if is_wide else None),
        service_role=selector.get(labels.ROLE),
        service_is_wide=is_wide,
        failures=failures,
        key_fault=key_fault,
        verify_request=str(annotations.get(labels.VERIFY, ""))[:MAX_REQUEST],
        rollout_command=str(annotations.get(labels.ROLLOUT, ""))[:MAX_REQUEST],
        budgets={
            name: workers_of_budget(number, pods.get(name, 1))
            for name, body in live.own("PodDisruptionBudget").items()
            if isinstance(number := body["spec"].get("minAvailable"), int)
        },
    )


def is_retired(record: Mapping[str, Any]) -> bool:
    return bool(record["metadata"]["labels"].get(labels.RETIRED) == "true")


def managed_etcd(
    live: Live, name: str, desired: int, faults: Mapping[str, Problem]
) -> DiscoveryState:
    """The managed etcd, by the readiness of its pods, with the worst problem of the others."""
    body = live.own("Deployment").get(name) or live.own("StatefulSet").get(name, {})
    pods = [each for each in live.children if _is_of_etcd(each)]
    found = [problem for pod in pods if (problem := pod_problem(pod, FOR_ETCD))]
    fault = faults.get(name) or refused_pods(body)
    if fault and is_short_of_pods(body):
        found.append(fault)
    return DiscoveryState(
        managed=True,
        ready=body.get("status", {}).get("readyReplicas", 0),
        desired=desired,
        problem=worst_of(found),
        ending=tuple(ending_pod(pod) for pod in pods if "deletionTimestamp" in pod["metadata"]),
    )


def workload_of(body: Mapping[str, Any]) -> WorkloadId | None:
    """Workload of a StatefulSet, snapshot or pod; None = of none, as etcd's, or of followers."""
    found = body["metadata"].get("labels", {})
    if found.get(labels.ROLE) in labels.FOLLOWER_OF.values():
        return None
    try:
        place = found[labels.CLUSTER], found[labels.ROLE], found[labels.POOL]
        return WorkloadId(*place, found[labels.REVISION], found.get(labels.TEMPLATE, ""))
    except KeyError:
        return None


def set_workload(stateful_set: Body) -> WorkloadId | None:
    """Workload of a StatefulSet, also of followers; None = of none, as etcd's."""
    group = group_of(stateful_set)
    return workload_of(stateful_set) if group is None else group.workload


def still_ending(live: Live, now: datetime) -> dict[WorkloadId, float | None]:
    """Workloads without a StatefulSet that still have pods of an earlier one: a new one could not
    make its own.  With the seconds to wait for those, None = unknown. A pod that should have ended
    long ago, as of a lost node, holds nothing back: the pod of its name waits for it. The others
    need not, though Kubernetes makes them only after a pod of a lower ordinal that it could make:
    with the first one stuck it makes none. Pods that were orphaned on purpose have no owner, and
    are adopted.
    """
    sets = {workload_of(body) for body in live.own("StatefulSet").values()}
    ending: dict[WorkloadId, float | None] = {}
    for identity, pods in pods_by_workload(live).items():
        waits = [_seconds_left(pod, now) for pod in pods]
        if identity not in sets and any(wait > 0 for wait in waits):
            ending[identity] = None if inf in waits else max(waits)
    return ending


def _seconds_left(pod: Body, now: datetime) -> float:
    """Time until a pod counts as stuck in termination; infinity = it is not terminating."""
    should_be_gone = pod["metadata"].get("deletionTimestamp")  # its grace period included
    if should_be_gone is None:
        return inf
    return (datetime.fromisoformat(should_be_gone) - now).total_seconds() + LATE_SECONDS


def ready_workers(
    live: Live, revision: str | None, draining: Collection[str] = ()
) -> list[tuple[WorkloadId, Body]]:
    """Pods of workers that are ready and do not end, of one revision; None = of all.  draining:
    pods that count too though they say that they are not ready any more
    """
    found, pods_by = [], pods_by_workload(live)
    for identity, groups in live.groups.items():
        leaders = (group.pods.get(group.id.leader_pod) for group in groups)
        pods_by[identity] += [pod for pod in leaders if pod is not None]
    for identity, pods in sorted(pods_by.items()):
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
            state = pod_state(pod)
            is_at_work = state.ready or (state.started and state.name in draining)
            if revision in (None, identity.revision) and is_at_work and not state.terminating:
                found.append((identity, pod))
    return found


def refused_pods(deployment: Body) -> Problem | None:
    """Problem that keeps a Deployment from getting pods; None = there is none."""
    for each in (deployment.get("status") or {}).get("conditions") or ():
        if (each.get("type"), each.get("status")) == ("ReplicaFailure", "True"):
            return refusal_of(str(each.get("message") or ""))
    return None


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
    pods, retired = pods_by_workload(live), live.retired
    recorded = [(each, body) for each, body in live.records() if each not in retired]
    records = {each.name: body for each, body in recorded}
    found = ((workload_of(body), body) for body in live.own("StatefulSet").values())
    sets = {
        identity: body
        for identity, body in found
        if identity is not None and group_of(body) is None
    }
    groups = live.groups
    kept = {identity for identity, body in recorded if pods_of_record(body) > 1}
    states = [
        *(
            _workload(
                *(identity, sets.get(identity), records.get(identity.name, {})),
                *(faults.get(identity.name), pods.get(identity, ())),
            )
            for identity in {*sets, *pods}
        ),
        *(
            _grouped(identity, groups.get(identity, []), records.get(identity.name, {}), faults)
            for identity in {*groups, *kept}
        ),
    ]
    return sorted(states, key=lambda state: state.id)


def _workload(
    identity: WorkloadId,
    body: Body | None,
    record: Body,
    fault: Problem | None,
    left: Iterable[Body],
) -> WorkloadState:
    """body: its StatefulSet; None = only pods are left of it"""
    pods = tuple(pod_state(pod) for pod in left)
    status = {"replicas": len(pods), "readyReplicas": sum(pod.ready for pod in pods)}
    if body is not None:
        status = body.get("status", {})
    return WorkloadState(
        id=identity,
        desired=0 if body is None else body["spec"].get("replicas", 1),
        current=status.get("replicas", 0),
        ready=status.get("readyReplicas", 0),
        updated=0 if body is None or _is_behind(body) else status.get("updatedReplicas", 0),
        gone=body is None or "deletionTimestamp" in body["metadata"],
        fault=fault,
        pods=pods,
        **_accelerators(record, pods),
    )


def _accelerators(record: Body, pods: Collection[PodState]) -> dict[str, Any]:
    """Those of a worker, as its record or else its pods have them."""
    pool = (record.get("data") or {}).get("pool")
    recorded: Mapping[str, Any] = pool if isinstance(pool, Mapping) else {}
    number, gpu = recorded.get("gpusPerReplica"), str(recorded.get("gpu", ""))
    if not isinstance(number, int):
        number = next(filter(None, (pod.gpus_per_replica for pod in pods)), 0)
    gpu = gpu or next(filter(None, (pod.gpu for pod in pods)), "")
    return {"gpu": gpu, "gpus_per_replica": number}


def _grouped(
    identity: WorkloadId, groups: Sequence[WorkerPods], record: Body, faults: Mapping[str, Problem]
) -> WorkloadState:
    """A workload whose workers are of several pods: all of it in workers, a pod for each."""
    living = [group for group in groups if not group.is_going]
    pods = tuple(group.state() for group in groups if group.pods)
    names = (name for group in living for name in (group.id.leader, group.id.followers))
    return WorkloadState(
        id=identity,
        desired=max((group.id.index + 1 for group in living), default=0),
        current=sum(len(group.pods) >= (group.num_pods or 1) for group in groups),
        ready=sum(pod.ready for pod in pods),
        updated=sum(_is_updated(group) for group in living),
        gone=not living and not record,
        fault=worst_of([*map(faults.get, names), *(group.held_back for group in living)]),
        pods=pods,
        **_accelerators(record, pods),
    )


def _is_updated(group: WorkerPods) -> bool:
    return all(
        not _is_behind(body) and body.get("status", {}).get("updatedReplicas", 0) > 0
        for body in group.sets.values()
    )


def group_restarts(live: Live, now: datetime) -> dict[GroupId, Restarting]:
    """Workers of several pods, and whether each is to start again as a whole."""
    clock = now.astimezone(UTC).replace(tzinfo=None)
    groups = (group for found in live.groups.values() for group in found)
    return {group.id: group.restarting(clock) for group in groups}


def _is_behind(body: Body) -> bool:
    """Return whether a StatefulSet's status is of an earlier template, or size."""
    seen = body.get("status", {}).get("observedGeneration")
    return seen is not None and seen < body["metadata"].get("generation", 0)


def pods_by_workload(live: Live) -> dict[WorkloadId, list[Body]]:
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
    number = int(seen) if seen.isdecimal() else None
    return ScalerState(spec["role"], spec["pool"], spec["replicas"], number, _writer(body))


def _writer(scaler: Body) -> str | None:
    for each in scaler["metadata"].get("managedFields") or ():
        fields = (each.get("fieldsV1") or {}).get("f:spec") or {}
        if "f:replicas" in fields and each.get("manager") != labels.FIELD_MANAGER:
            return str(each.get("manager"))
    return None
