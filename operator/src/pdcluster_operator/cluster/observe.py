"""From cached bodies to what the planner reads: one PDCluster, its workloads, scalers, etcd and Service.

Pure.  Only children of this very PDCluster count: those of an earlier one of
the same name are about to be collected.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdcluster_operator.api import labels
from pdcluster_operator.api.workload import WorkloadId
from pdcluster_operator.cluster.cache import Body, Key
from pdcluster_operator.plan.pods import pod_state
from pdcluster_operator.plan.state import DiscoveryState, Failure, Observed, ScalerState, WorkloadState


@dataclass(frozen=True)
class Live:
    """A PDCluster's body and the bodies of its children."""

    body: Body
    children: Sequence[Body]
    _own: dict[str, dict[str, Body]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        own: defaultdict[str, dict[str, Body]] = defaultdict(dict)
        for child in self.children:
            if self.uid in owner_uids(child):
                own[child["kind"]][child["metadata"]["name"]] = child
        object.__setattr__(self, "_own", dict(own))

    @property
    def key(self) -> Key:
        """Which PDCluster."""
        return Key(self.body["metadata"]["namespace"], self.body["metadata"]["name"])

    @property
    def uid(self) -> str:
        """Uid of the PDCluster."""
        return str(self.body["metadata"]["uid"])

    @property
    def is_going(self) -> bool:
        """Whether it is being deleted."""
        return "deletionTimestamp" in self.body["metadata"]

    def own(self, kind: str) -> dict[str, Body]:
        """Children of one kind by name."""
        return self._own.get(kind, {})


def observe(
    live: Live,
    *,
    discovery: DiscoveryState,
    failures: Sequence[Failure] = (),
    faults: Mapping[str, tuple[str, str]],
) -> Observed:
    """The cluster as it is.

    failures: what the API server refused in the last pass
    faults:   why a StatefulSet, by its name, gets no pods
    """
    service = live.own("Service").get(live.key.name)
    return Observed(
        generation=live.body["metadata"]["generation"],
        status=live.body.get("status", {}),
        discovery=discovery,
        workloads=_workloads(live, faults),
        records=sorted(identity for body in live.own("ControllerRevision").values() if (identity := workload_of(body))),
        scalers=[_scaler(body) for body in live.own("PDPoolScaler").values()],
        service_revision=None if service is None else service["spec"].get("selector", {}).get(labels.REVISION),
        failures=failures,
    )


def managed_etcd(live: Live, name: str, wanted: int) -> DiscoveryState:
    """The etcd that is run for the cluster, by the readiness of its pods."""
    body = live.own("StatefulSet").get(name, {})
    return DiscoveryState(managed=True, ready=body.get("status", {}).get("readyReplicas", 0), wanted=wanted)


def workload_of(body: Mapping[str, Any]) -> WorkloadId | None:
    """Which workload a StatefulSet, record or pod is of; None = of none, as etcd's."""
    found = body["metadata"].get("labels", {})
    try:
        return WorkloadId(found[labels.CLUSTER], found[labels.ROLE], found[labels.POOL], found[labels.REVISION])
    except KeyError:
        return None


def is_short_of_pods(body: Mapping[str, Any]) -> bool:
    """Whether a StatefulSet has fewer pods than it should have."""
    return int(body.get("status", {}).get("replicas", 0)) < int(body["spec"].get("replicas", 1))


def owner_uids(body: Mapping[str, Any]) -> list[str]:
    """Uids of an object's owners."""
    return [reference["uid"] for reference in body["metadata"].get("ownerReferences", ())]


def _workloads(live: Live, faults: Mapping[str, tuple[str, str]]) -> list[WorkloadState]:
    """Of every StatefulSet, and of pods whose StatefulSet is gone while they end."""
    pods = _pods_by_workload(live.children)
    sets = {identity: body for body in live.own("StatefulSet").values() if (identity := workload_of(body))}
    return [
        _workload(identity, sets[identity], faults.get(identity.name), pods.get(identity, []))
        if identity in sets
        else _remains(identity, pods[identity])
        for identity in sorted({*sets, *pods})
    ]


def _remains(identity: WorkloadId, pods: Sequence[Body]) -> WorkloadState:
    states = tuple(pod_state(pod) for pod in pods)
    return WorkloadState(identity, 0, len(states), sum(state.ready for state in states), 0, gone=True, pods=states)


def _workload(identity: WorkloadId, body: Body, fault: tuple[str, str] | None, pods: Iterable[Body]) -> WorkloadState:
    status = body.get("status", {})
    return WorkloadState(
        id=identity,
        desired=body["spec"].get("replicas", 1),
        current=status.get("replicas", 0),
        ready=status.get("readyReplicas", 0),
        updated=status.get("updatedReplicas", 0),
        settled=status.get("observedGeneration", 0) >= body["metadata"].get("generation", 0),
        gone="deletionTimestamp" in body["metadata"],
        fault=fault,
        pods=tuple(pod_state(pod) for pod in pods),
    )


def _pods_by_workload(children: Iterable[Body]) -> dict[WorkloadId, list[Body]]:
    """Pods are the StatefulSets' children, not the PDCluster's; their labels say whose they are."""
    found: defaultdict[WorkloadId, list[Body]] = defaultdict(list)
    for body in children:
        identity = workload_of(body) if body["kind"] == "Pod" else None
        if identity is not None:
            found[identity].append(body)
    return found


def _scaler(body: Body) -> ScalerState:
    spec = body["spec"]
    seen = body["metadata"].get("annotations", {}).get(labels.SEEN_REPLICAS, "")
    return ScalerState(spec["role"], spec["pool"], spec["replicas"], int(seen) if seen.isdecimal() else None)
