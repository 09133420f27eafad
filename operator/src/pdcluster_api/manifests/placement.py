"""Scheduling of a worker pod: its accelerator's nodes, its KV domain, spread over machines."""

import copy
from typing import Any

from pdcluster_api.manifests.objects import Manifest, workload_selector
from pdcluster_schema.labels import CLUSTER, REVISION
from pdcluster_schema.placement import PlacementSpec
from pdcluster_schema.sections import AcceleratorSpec
from pdcluster_schema.workload import WorkloadId

_HOST = "kubernetes.io/hostname"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def placement_of(
    workload: WorkloadId, accelerator: AcceleratorSpec, placement: PlacementSpec | None
) -> Manifest:
    affinity = {
        **_node_affinity(accelerator),
        **(_domain_affinity(workload, placement) if placement and placement.domain_label else {}),
    }
    fields: Manifest = {"topologySpreadConstraints": [_spread(workload)]}
    if affinity:
        fields["affinity"] = affinity
    if accelerator.resource:
        fields["tolerations"] = [_toleration(accelerator.resource)]
    return fields


def with_accelerator(spec: Manifest, accelerator: AcceleratorSpec) -> Manifest:
    """A pod's spec after the user's template, whose lists took the place of ours: what the
    accelerator needs is added to them.  A node must fit one of the terms, so our labels go into
    each. Node affinity that the template removed stays away.
    """
    kept, tolerations = dict(spec), spec.get("tolerations", [])
    if accelerator.resource and isinstance(tolerations, list):
        ours = _toleration(accelerator.resource)
        kept["tolerations"] = tolerations if ours in tolerations else [*tolerations, ours]
    affinity = copy.deepcopy(spec.get("affinity"))
    terms = _at(affinity, "nodeAffinity", _REQUIRED, "nodeSelectorTerms")
    if accelerator.node_labels and isinstance(terms, list):
        for term in terms:
            _add_expressions(term, _expressions(accelerator))
        kept["affinity"] = affinity
    return kept


def _at(content: Any, *path: str) -> Any:
    """The value at a path, None where a template has something else than maps on the way."""
    for name in path:
        content = content.get(name) if isinstance(content, dict) else None
    return content


def _add_expressions(term: Any, expressions: list[Manifest]) -> None:
    if not isinstance(term, dict) or not (term.get("matchExpressions") or term.get("matchFields")):
        return
    given = term.get("matchExpressions") or []
    if isinstance(given, list):
        term["matchExpressions"] = [
            *given,
            *(expression for expression in expressions if expression not in given),
        ]


def _toleration(resource: str) -> Manifest:
    """GPU nodes are often tainted with their resource's name, to keep pods away that need none."""
    return {"key": resource, "operator": "Exists", "effect": "NoSchedule"}


def _node_affinity(accelerator: AcceleratorSpec) -> dict[str, Any]:
    if not accelerator.node_labels:
        return {}
    return {
        "nodeAffinity": {
            _REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": _expressions(accelerator)}]}
        }
    }


def _expressions(accelerator: AcceleratorSpec) -> list[Manifest]:
    return [
        {"key": key, "operator": "In", "values": [value]}
        for key, value in sorted(accelerator.node_labels.items())
    ]


def _domain_affinity(workload: WorkloadId, placement: PlacementSpec) -> dict[str, Any]:
    """The first worker of a revision chooses the domain, the others follow it."""
    term = {
        "labelSelector": {"matchLabels": {CLUSTER: workload.cluster, REVISION: workload.revision}},
        "topologyKey": placement.domain_label,
    }
    if placement.mode == "Required":
        return {"podAffinity": {_REQUIRED: [term]}}
    return {
        "podAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 100, "podAffinityTerm": term}
            ]
        }
    }


def _spread(workload: WorkloadId) -> Manifest:
    return {
        "maxSkew": 1,
        "topologyKey": _HOST,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": workload_selector(workload)},
    }
