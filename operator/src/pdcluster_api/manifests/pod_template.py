"""A worker pod's scheduling (its accelerator's nodes, its KV domain), and the user's pod templates
over it: that of the spec, of which a pod takes what it has a place for, then that of the role.
"""

import copy
from collections.abc import Callable, Hashable
from typing import Any

from pdcluster_api.manifests.objects import Manifest, node_tolerations
from pdcluster_api.manifests.vllm import ENGINE_CONTAINER
from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.labels import CLUSTER, REVISION, WORKER
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.placement import PlacementSpec
from pdcluster_schema.sections import ENGINELESS, AcceleratorSpec
from pdcluster_schema.workload import WorkloadId

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def placement_of(
    workload: WorkloadId, accelerator: AcceleratorSpec, placement: PlacementSpec | None
) -> Manifest:
    affinity: Manifest = {}
    if accelerator.node_labels:
        terms = [{"matchExpressions": _expressions(accelerator)}]
        affinity["nodeAffinity"] = {_REQUIRED: {"nodeSelectorTerms": terms}}
    if placement and placement.domain_label:
        # the first worker of a revision chooses the domain, the others follow it; workers of
        # several pods choose their own
        term = {
            "labelSelector": {
                "matchLabels": {CLUSTER: workload.cluster, REVISION: workload.revision},
                "matchExpressions": [{"key": WORKER, "operator": "DoesNotExist"}],
            },
            "topologyKey": placement.domain_label,
        }
        affinity["podAffinity"] = (
            {_PREFERRED: [{"weight": 100, "podAffinityTerm": term}]}
            if placement.mode == "Preferred"
            else {_REQUIRED: [term]}
        )
    fields: Manifest = {"affinity": affinity} if affinity else {}
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
    affinity = terms = copy.deepcopy(spec.get("affinity"))
    for name in ("nodeAffinity", _REQUIRED, "nodeSelectorTerms"):
        terms = terms.get(name) if isinstance(terms, dict) else None
    if accelerator.node_labels and isinstance(terms, list):
        for term in terms:
            _add_expressions(term, _expressions(accelerator))
        kept["affinity"] = affinity
    return kept


def with_node_tolerations(spec: Manifest) -> Manifest:
    """A pod's spec with ours for a node that is lost, as far as the user's template has none."""
    given = spec.get("tolerations") or []
    if not isinstance(given, list):
        return spec
    ours = [each for each in node_tolerations() if not any(_covers(each, one) for one in given)]
    return {**spec, "tolerations": [*given, *ours]}


def _covers(ours: Manifest, given: Any) -> bool:
    """As the API server sees it, which adds a toleration of 300 s where there is none."""
    return isinstance(given, dict) and all(
        given.get(field) in (None, "", ours[field]) for field in ("key", "effect")
    )


def _add_expressions(term: Any, expressions: list[Manifest]) -> None:
    if not isinstance(term, dict) or not (term.get("matchExpressions") or term.get("matchFields")):
        return
    given = term.get("matchExpressions") or []
    if isinstance(given, list):
        term["matchExpressions"] = [*given, *(each for each in expressions if each not in given)]


def _toleration(resource: str) -> Manifest:
    """GPU nodes are often tainted with their resource's name, to keep pods away that need none."""
    return {"key": resource, "operator": "Exists", "effect": "NoSchedule"}


def _expressions(accelerator: AcceleratorSpec) -> list[Manifest]:
    return [
        {"key": key, "operator": "In", "values": [value]}
        for key, value in sorted(accelerator.node_labels.items())
    ]


_CONTAINERS = ("initContainers", "containers")


def with_templates(rendered: Manifest, spec: PDClusterSpec, role: str) -> Manifest:
    """The pod template of a role's workers; `rendered` is not changed."""
    shared = spec.pod_template
    has_engine = any(map(_is_engine, rendered["spec"].get("initContainers", ())))
    if not has_engine:
        shared = _with_containers(shared, _no_engine)
    if role in ENGINELESS:
        shared = _without_accelerators(shared, with_runtime=not _has_accelerators(spec))
    own = spec.roles.present()[role].pod_template
    merged = merge_pod_template(merge_pod_template(rendered, shared), own)
    return _with_containers(merged, _engine_last) if has_engine else merged


def _is_engine(container: Any) -> bool:
    return isinstance(container, dict) and container.get("name") == ENGINE_CONTAINER


def _has_accelerators(spec: PDClusterSpec) -> bool:
    pools = (pool for role in spec.roles.computing().values() for pool in role.pools)
    return any(pool.gpu != NO_ACCELERATOR for pool in pools)


def _no_engine(field: str, containers: list[Any]) -> list[Any]:
    if field != "initContainers":
        return containers
    return [each for each in containers if not _is_engine(each)]


def _engine_last(field: str, containers: list[Any]) -> list[Any]:
    """The sidecar after all that has to end before it: a download, a check of the network."""
    return sorted(containers, key=_is_engine) if field == "initContainers" else containers


def _without_accelerators(template: Manifest, *, with_runtime: bool) -> Manifest:
    """Without device claims, which a pod holds also where no container uses them, and without the
    runtime class of accelerators.
    """
    spec = template.get("spec")
    if not isinstance(spec, dict):
        return template
    dropped = {"resourceClaims"} | (set() if with_runtime else {"runtimeClassName"})
    kept = {name: value for name, value in spec.items() if name not in dropped}
    changed = {**template, "spec": kept}
    return _with_containers(changed, lambda _, containers: list(map(_without_claims, containers)))


def _without_claims(container: Any) -> Any:
    resources = container.get("resources") if isinstance(container, dict) else None
    if not isinstance(resources, dict):
        return container
    kept = {name: value for name, value in resources.items() if name != "claims"}
    return {**container, "resources": kept}


def _with_containers(template: Manifest, change: Callable[[str, list[Any]], list[Any]]) -> Manifest:
    """The template with each of its lists of containers as `change(field, containers)` makes it;
    what is none is left to the API server to refuse.
    """
    spec = template.get("spec")
    if not isinstance(spec, dict):
        return template
    changed = {
        field: change(field, spec[field])
        for field in _CONTAINERS
        if isinstance(spec.get(field), list)
    }
    return {**template, "spec": {**spec, **changed}}


_PATCH = "$patch"
_DELETED = object()
_Identity = tuple[Hashable, ...]
_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
# of a probe or a hook: one of them only
_ACTIONS = frozenset({"exec", "httpGet", "tcpSocket", "grpc", "sleep"})


def merge_pod_template(rendered: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    return _merge_maps(copy.deepcopy(rendered), copy.deepcopy(patch))


def _merge_maps(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    directive = patch.pop(_PATCH, None)
    if directive == "delete":
        return {}
    merged = {} if directive == "replace" else base
    if _ACTIONS & patch.keys():
        merged = {
            key: value for key, value in merged.items() if key in patch or key not in _ACTIONS
        }
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_values(key, merged.get(key), value)
    return merged


def _merge_values(field: str, base: Any, patch: Any) -> Any:
    if isinstance(patch, dict):
        return _merge_maps(base if isinstance(base, dict) else {}, patch)
    if isinstance(patch, list) and field in _KEYS:
        return _merge_lists(field, base if isinstance(base, list) else [], patch)
    return patch


def _merge_lists(field: str, base: list[Any], patch: list[Any]) -> list[Any]:
    """By key and in the order of `base`; what is new comes last.  An item of nothing but `$patch:
    replace` drops all of `base`.
    """
    merged = [] if {_PATCH: "replace"} in patch else base
    places = {
        identity: place
        for place, item in enumerate(merged)
        if (identity := _identity(field, item)) is not None
    }
    for item in patch:
        if not isinstance(item, dict):
            merged.append(item)
        elif item != {_PATCH: "replace"}:
            _merge_item(field, merged, places, item)
    return [item for item in merged if item is not _DELETED]


def _merge_item(
    field: str, merged: list[Any], places: dict[_Identity, int], item: dict[str, Any]
) -> None:
    identity = _identity(field, item)
    place = None if identity is None else places.get(identity)
    if item.get(_PATCH) == "delete":
        if identity is not None and place is not None:
            merged[place] = _DELETED
            del places[identity]
        return
    if place is None:
        if identity is not None:
            places[identity] = len(merged)
        merged.append(_merge_maps({}, item))
        return
    base = merged[place]
    if field == "volumes" and len(item) > 1:  # a volume has one source: another one takes its place
        base = {key: value for key, value in base.items() if key in item}
    merged[place] = _merge_maps(base, item)


def _identity(field: str, item: Any) -> _Identity | None:
    keys = _KEYS[field]
    return (
        tuple(value if isinstance(value := item[key], Hashable) else repr(value) for key in keys)
        if isinstance(item, dict) and all(key in item for key in keys)
        else None
    )
