"""The revision: a short name for everything that a worker's pod and engine file are made of.

Workers of one revision may talk; those of another live under another etcd
prefix and never meet.  Policy, the Service's port, replicas, and which pools
there are do not count: a pool can come and go, and keeps its gpu for its life.
Nor do definitions of accelerators, which come and go with pools, and which
no edit changes (the CRD holds both).  Values that are the default do not count
either, so that an operator that knows one more field gives every object the
revision it had; a given size counts whose default a CPU and an accelerator differ in.

A new revision is named by the spec as it is written, as it ever was.  A spec whose pods are the
same as those of a revision that runs keeps that one's name (`at_revision`): so written otherwise,
with an edit of routers alone, or under another operator, it replaces no worker.  One that changes
a role alone, and nothing that others have to have in common with it (`pair_hash`), keeps the name
too, and that role gets another template (`continued`).
"""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import Field

from pdcluster_schema.engine import BY_DEVICE, EngineSpec
from pdcluster_schema.pdcluster import PDCluster, PDClusterSpec
from pdcluster_schema.placement import PlacementSpec
from pdcluster_schema.quantities import canonical_quantity
from pdcluster_schema.section import SpecSection
from pdcluster_schema.sections import ENGINELESS, RoleSpec
from pdcluster_schema.workload import REVISION_LENGTH

# of a role, and in no revision that leaves them out
_NEWER = {"resource_claims", "shared_memory", "startup_timeout_seconds"}
_OF_QUANTITIES = frozenset({"requests", "limits"})
_QUANTITIES = frozenset({"sizeLimit", "divisor"})
_SETS = frozenset(
    (
        *("imagePullSecrets", "tolerations", "topologySpreadConstraints", "resource_claims"),
        *("add", "drop", "values"),
    )
)
# lists that add to what is rendered
_ADDED_LISTS = frozenset(
    (
        *("containers", "initContainers", "volumes", "env", "volumeMounts", "ports"),
        *("imagePullSecrets", "tolerations", "topologySpreadConstraints"),
    )
)
_NOTHING_IF_EMPTY = frozenset(
    (
        *("metadata", "spec", "labels", "annotations", "nodeSelector", "securityContext"),
        *("capabilities", "resources", "requests", "limits"),
        *("affinity", "nodeAffinity", "podAffinity", "podAntiAffinity"),
    )
)


# Fields of a role's engine that workers of other roles need not have in common with it. What they
# have to, of two roles that differ in it, is refused: its changes are of all roles together.
_OWN_ENGINE = BY_DEVICE | {
    *("args", "env", "allow_unknown_version"),
    *("device_memory_share", "num_blocks", "threads"),
    *("transfer_bandwidth", "fence_timeout_seconds"),
    *("scheduler", "scheduling_policy", "long_prefill_token_threshold", "chunked_prefill"),
    *("tbt_slo_milliseconds", "chunk_schedule", "admission_watermark"),
    *("prefill_delayer", "speculation"),
}
# of a role's pod template: another image or program may not understand the other role
_SHARED_POD = ("initContainers", "containers")


class RunningSpec(PDClusterSpec):
    """A spec whose pods run already, under the name of this revision."""

    running_revision: str = Field(exclude=True)
    # by role, of those that have followed a change of their own
    running_templates: Mapping[str, str] = Field(default={}, exclude=True)
    # those pods are of an earlier spec, to which a roll out went back
    is_rolled_back: bool = Field(default=False, exclude=True)
    # declared pools that the earlier spec had not: "decode pool b200"
    left_out: tuple[str, ...] = Field(default=(), exclude=True)


def revision_of(spec: PDClusterSpec) -> str:
    """The revision that the spec runs as, else the one that it is named by."""
    if isinstance(spec, RunningSpec):
        return spec.running_revision
    return written_revision(spec)


def templates_of(spec: PDClusterSpec) -> Mapping[str, str]:
    """Templates by role (`WorkloadId.template`), of roles whose is not that of the revision."""
    return spec.running_templates if isinstance(spec, RunningSpec) else {}


def is_rolled_back(spec: PDClusterSpec) -> bool:
    """True if what runs was made of an earlier spec, and stays."""
    return isinstance(spec, RunningSpec) and spec.is_rolled_back


def pools_left_out(spec: PDClusterSpec) -> tuple[str, ...]:
    """Declared pools without workers, since the revision that was gone back to had none of them."""
    return spec.left_out if isinstance(spec, RunningSpec) else ()


def rollout_name(spec: PDClusterSpec) -> str:
    """The revision that it runs as, with the templates of roles that changed within it."""
    return "-".join([revision_of(spec), *(each for _, each in sorted(templates_of(spec).items()))])


def written_revision(spec: PDClusterSpec) -> str:
    """First hexadecimal digits of a hash over all that pods are made of, as it is written."""
    return _written(_Same(spec))


def written_names(spec: PDClusterSpec) -> tuple[str, str]:
    """Revisions that name the spec as it is written: by this operator, and by one that gave
    all workers the sizes of a CPU.
    """
    same = _Same(spec)
    return _written(same), _written(same, knows_devices=False)


def template_hash(spec: PDClusterSpec, role: str | None = None) -> str:
    """A hash that all specs share which make the same pods, however they are written.

    role: `router` or `picker` = over what its pods have for themselves; any other = over the pods
          of all workers with an engine, which are replaced together
    """
    return _template_hash(_Same(spec), role=role if role in ENGINELESS else None)


def pair_hash(spec: PDClusterSpec) -> str:
    """A hash that all specs share whose workers pair with each other, whatever their sizes are."""
    return _pair_hash(_Same(spec))


def role_hash(spec: PDClusterSpec, role: str) -> str:
    """A hash that all specs share which make the same pods of a role with an engine."""
    return _role_hash(_Same(spec), role)


def template_name(spec: PDClusterSpec, role: str, revision: str) -> str:
    """Template of a role that changes within a revision.  Not its hash alone: another revision
    that runs meanwhile may have the same workers, and names of objects have one of the two.
    """
    return _hash([revision, role_hash(spec, role)])


def at_revision(
    cluster: PDCluster,
    revision: str,
    templates: Mapping[str, str] | None = None,
    *,
    is_rolled_back: bool = False,
    left_out: tuple[str, ...] = (),
) -> PDCluster:
    """The cluster, whose pods run already under the name of this revision."""
    own = {role: each for role, each in (templates or {}).items() if each}
    if (revision, own) == (revision_of(cluster.spec), templates_of(cluster.spec)):
        return cluster
    values = {
        **dict(cluster.spec),
        "running_revision": revision,
        "running_templates": own,
        "is_rolled_back": is_rolled_back,
        "left_out": left_out,
    }
    spec = RunningSpec.model_construct(cluster.spec.model_fields_set, **values)
    return cluster.model_copy(update={"spec": spec})


class _Same:
    """A spec that equals itself alone.  It is frozen, and one reconcile asks for its revision a
    dozen times.
    """

    def __init__(self, spec: PDClusterSpec) -> None:
        self.spec = spec

    def __hash__(self) -> int:
        return id(self.spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.spec is other.spec


@lru_cache(maxsize=32)
def _written(same: _Same, *, knows_devices: bool = True) -> str:
    roles = _roles(same.spec, same.spec.roles.present(), knows_devices=knows_devices)
    return _hash(_shared(same.spec) | {"roles": roles})


@lru_cache(maxsize=32)
def _template_hash(same: _Same, *, role: str | None) -> str:
    spec = same.spec
    if role is not None:
        own = {name: each for name, each in spec.roles.engineless().items() if name == role}
        return _hash(canonical(_roles(spec, own)))
    return _hash(
        canonical({**_shared_in_order(spec), "roles": _roles(spec, spec.roles.computing())})
    )


@lru_cache(maxsize=32)
def _pair_hash(same: _Same) -> str:
    roles = {
        role: {
            "engine": same.spec.engine_of(role).model_dump(
                exclude_defaults=True, exclude=set(_OWN_ENGINE)
            ),
            "pod": {
                name: pod[name]
                for pod in (declared.pod_template.get("spec") or {},)
                for name in _SHARED_POD
                if name in pod
            },
        }
        for role, declared in same.spec.roles.computing().items()
    }
    return _hash(canonical({**_shared_in_order(same.spec), "roles": roles}))


@lru_cache(maxsize=64)
def _role_hash(same: _Same, role: str) -> str:
    own = _roles(same.spec, {role: same.spec.roles.computing()[role]})
    return _hash(canonical({**_shared_in_order(same.spec), "roles": own}))


def _shared_in_order(spec: PDClusterSpec) -> dict[str, Any]:
    shared, etcd = _shared(spec), spec.discovery.etcd
    image = shared["image"] | {"pull_secrets": in_order(spec.image.pull_secrets)}
    return {**shared, "image": image, "etcd": [in_order(etcd.endpoints), etcd.tls_secret]}


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:REVISION_LENGTH]


def _shared(spec: PDClusterSpec) -> dict[str, Any]:
    etcd = spec.discovery.etcd
    return {
        "model": _set_fields(spec.model),
        "image": _set_fields(spec.image),
        "etcd": [etcd.endpoints, etcd.tls_secret],
        "apiKeys": spec.service.api_key_secret,
        "placement": _placement(spec.placement),
        "grace": spec.rollout.grace_period_seconds,
        "podTemplate": spec.pod_template,
    }


def _roles(
    spec: PDClusterSpec, roles: Mapping[str, RoleSpec], *, knows_devices: bool = True
) -> dict[str, Any]:
    return {
        name: {
            "engine": _set_fields(spec.engine_of(name))
            | (_by_device(spec.engine_of(name)) if knows_devices else {}),
            "resources": _set_fields(role.resources),
            "podTemplate": role.pod_template,
        }
        | role.model_dump(include=_NEWER, exclude_defaults=True)
        for name, role in roles.items()
    }


def _by_device(engine: EngineSpec) -> dict[str, Any]:
    """Given values that are a CPU's default, while an accelerator has another: whichever pools
    there are, so that a pool of either can come and go.
    """
    return engine.model_dump(include=set(BY_DEVICE & engine.model_fields_set))


def _placement(placement: PlacementSpec | None) -> dict[str, Any] | None:
    """The part that pods are made of: how fast KV has to move is none."""
    if placement is None or not (placement.domain_label or placement.gang):
        return None
    return placement.model_dump(exclude_defaults=True, exclude={"min_transfer_gbps"})


def _set_fields(section: SpecSection) -> dict[str, Any]:
    """The values that differ from the defaults."""
    return section.model_dump(exclude_defaults=True)


def canonical(value: Any, field: str = "") -> Any:
    """A template, or a part of one (`field`), in one spelling of what Kubernetes takes in several:
    quantities, sets, empty maps.

    Kustomize, Helm and editors write `1`, `"1"` and `1000m` as they like.  Two templates that are
    equal after it make the same pods.  Lists whose order counts stay as they are, and so do empty
    maps that say something, such as `emptyDir: {}` or a selector of everything.

    >>> canonical({"limits": {"cpu": "1", "memory": "1024Mi"}, "requests": {}})
    {'limits': {'cpu': 1, 'memory': '1Gi'}}
    """
    if isinstance(value, dict):
        return _map(value, field)
    if isinstance(value, list | tuple):
        return _list(value, field)
    return canonical_quantity(value) if field in _QUANTITIES else value


def _map(value: dict[str, Any], field: str) -> dict[str, Any]:
    if field in _OF_QUANTITIES:
        return {name: canonical_quantity(amount) for name, amount in value.items()}
    items = {name: canonical(item, name) for name, item in value.items()}
    return {name: item for name, item in items.items() if not _is_nothing(name, item)}


def _is_nothing(name: str, item: Any) -> bool:
    return (item == {} and name in _NOTHING_IF_EMPTY) or (item == [] and name in _ADDED_LISTS)


def _list(value: list[Any] | tuple[Any, ...], field: str) -> list[Any]:
    items = [canonical(item) for item in value]
    return in_order(items) if field in _SETS else items


def in_order(values: Any) -> list[Any]:
    """The members of a set, each once."""
    members = {json.dumps(each, sort_keys=True): each for each in values}
    return [members[key] for key in sorted(members)]
