"""Gang scheduling of a worker of several pods: all of them get nodes at once, or none does. Pure.
Schedulers find the pods of a PodGroup by a label or an annotation of theirs.
"""

from typing import Any, NamedTuple

from pdcluster_api.manifests.objects import Manifest, Owner, new_object
from pdcluster_schema.labels import WORKER
from pdcluster_schema.placement import PlacementSpec


class GangScheduler(NamedTuple):
    kind: str  # its PodGroup, as `new_object` takes it
    mark: tuple[str, str]  # of its pods: `labels` or `annotations`, and the key of the group's name
    # of its pods, where their template names none; empty = the cluster's default may be it
    scheduler_name: str = ""


GANG_SCHEDULERS = {
    "PodGroup": GangScheduler(
        "scheduling.x-k8s.io/v1alpha1/PodGroup", ("labels", "scheduling.x-k8s.io/pod-group")
    ),
    "Volcano": GangScheduler(
        "scheduling.volcano.sh/v1beta1/PodGroup",
        ("annotations", "scheduling.k8s.io/group-name"),
        "volcano",
    ),
}


def gang_of(placement: PlacementSpec | None) -> dict[str, Any]:
    """The part of a record by which each worker has a PodGroup."""
    if placement is None or placement.gang is None:
        return {}
    queue = {} if placement.queue is None else {"queue": placement.queue}
    return {"gang": {"scheduler": placement.gang, **queue}}


def pod_group(
    gang: Manifest, marks: dict[str, str], num_pods: int, owner: Owner, pod: Manifest
) -> Manifest:
    """marks: of the worker's objects, by which it is named too; pod: its spec."""
    spec = {"minMember": num_pods, **({"queue": gang["queue"]} if "queue" in gang else {})}
    if gang["scheduler"] == "Volcano" and "priorityClassName" in pod:
        spec["priorityClassName"] = pod["priorityClassName"]  # which it takes from nowhere else
    kind = GANG_SCHEDULERS[gang["scheduler"]].kind
    return new_object(kind, marks[WORKER], owner, marks, spec=spec)


def in_gang(gang: Manifest, template: Manifest, name: str) -> Manifest:
    """The template of pods that are members.  name: of the PodGroup"""
    _, (field, key), scheduler_name = GANG_SCHEDULERS[gang["scheduler"]]
    metadata, default = template["metadata"], {"schedulerName": scheduler_name}
    return {
        **template,
        "metadata": {**metadata, field: {**metadata.get(field, {}), key: name}},
        "spec": {**(default if scheduler_name else {}), **template["spec"]},
    }
