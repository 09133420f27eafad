"""Where a worker pod may and should run: its accelerator's nodes, its KV domain, spread over machines."""

from typing import Any

from pdcluster_operator.api.labels import CLUSTER, REVISION
from pdcluster_operator.api.sections import AcceleratorSpec, PlacementSpec
from pdcluster_operator.api.workload import WorkloadId
from pdcluster_operator.manifests.objects import Manifest, workload_selector

_HOST = "kubernetes.io/hostname"


def placement_of(workload: WorkloadId, accelerator: AcceleratorSpec, placement: PlacementSpec | None) -> Manifest:
    """The fields of a pod's spec that say where it runs."""
    affinity = {**_node_affinity(accelerator), **(_domain_affinity(workload, placement) if placement else {})}
    fields: Manifest = {"topologySpreadConstraints": [_spread(workload)]}
    if affinity:
        fields["affinity"] = affinity
    if accelerator.resource:
        # GPU nodes are often tainted with their resource's name, to keep pods away that need none.
        fields["tolerations"] = [{"key": accelerator.resource, "operator": "Exists", "effect": "NoSchedule"}]
    return fields


def _node_affinity(accelerator: AcceleratorSpec) -> dict[str, Any]:
    if not accelerator.node_labels:
        return {}
    expressions = [{"key": key, "operator": "In", "values": [value]} for key, value in sorted(accelerator.node_labels.items())]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": expressions}]}}}


def _domain_affinity(workload: WorkloadId, placement: PlacementSpec) -> dict[str, Any]:
    """All workers of a revision beside each other: the first one chooses the domain, the others follow it."""
    term = {
        "labelSelector": {"matchLabels": {CLUSTER: workload.cluster, REVISION: workload.revision}},
        "topologyKey": placement.domain_label,
    }
    if placement.mode == "Required":
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}}


def _spread(workload: WorkloadId) -> Manifest:
    return {
        "maxSkew": 1,
        "topologyKey": _HOST,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": workload_selector(workload)},
    }
