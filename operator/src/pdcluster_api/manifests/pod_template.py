"""The user's pod templates over a rendered pod: that of the spec, then that of the role.

The spec's is one for every role, so a pod takes of it what it has a place for:
the container `engine` only beside a stock engine, and nothing of an accelerator
in a router, which computes nothing.  What the role's own template says counts as
it is.
"""

from collections.abc import Callable
from typing import Any

from pdcluster_api.manifests.engine_container import ENGINE_CONTAINER
from pdcluster_api.manifests.objects import Manifest
from pdcluster_api.manifests.strategic_merge import merge_pod_template
from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.sections import ROUTER

_CONTAINERS = ("initContainers", "containers")


def with_templates(rendered: Manifest, spec: PDClusterSpec, role: str) -> Manifest:
    """The pod template of a role's workers; `rendered` is not changed."""
    shared, has_engine = spec.pod_template, _has_engine(rendered)
    if not has_engine:
        shared = _with_containers(shared, _no_engine)
    if role == ROUTER:
        shared = _without_accelerators(shared, with_runtime=not _has_accelerators(spec))
    own = spec.roles.present()[role].pod_template
    merged = merge_pod_template(merge_pod_template(rendered, shared), own)
    return _with_containers(merged, _engine_last) if has_engine else merged


def _has_engine(pod: Manifest) -> bool:
    return any(map(_is_engine, pod["spec"].get("initContainers", ())))


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
    return _with_containers({**template, "spec": kept}, _no_claims)


def _no_claims(_: str, containers: list[Any]) -> list[Any]:
    return [_without_claims(each) for each in containers]


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
