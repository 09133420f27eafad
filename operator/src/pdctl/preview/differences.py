"""Differences of two objects by path in YAML, and those that the CRD's rules refuse."""

import json
from collections.abc import Iterator, Mapping, Set
from typing import Any

from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.engine import BY_DEVICE, EngineSpec
from pdcluster_schema.faults import Fault
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.sections import AcceleratorSpec, PoolSpec

Differing = tuple[str, Any, Any]
"""(path, value before, value after); None = not given"""


def changed_fields(old: PDCluster, new: PDCluster) -> list[Differing]:
    """In the order of the sections; pools are matched by name."""
    before, after = dict(_leaves("", _document(old))), dict(_leaves("", _document(new)))
    paths = list(dict.fromkeys([*before, *after]))
    differing = [
        (path, before.get(path), after.get(path))
        for path in paths
        if before.get(path) != after.get(path)
    ]
    return [*differing, *_newly_given(old.spec.engine, new.spec.engine)]


def _newly_given(old: EngineSpec, new: EngineSpec) -> Iterator[Differing]:
    """Sizes that are equal on a CPU, given by one engine and left out by the other."""
    before, after = _sizes(old, old.model_fields_set), _sizes(new, new.model_fields_set)
    same = _sizes(old, BY_DEVICE).items() & _sizes(new, BY_DEVICE).items()
    for name in sorted(dict(same).keys() & (before.keys() ^ after.keys())):
        yield f"spec.engine.{name}", before.get(name), after.get(name)


def _sizes(engine: EngineSpec, fields: Set[str]) -> dict[str, Any]:
    return engine.model_dump(mode="json", by_alias=True, include=set(BY_DEVICE & fields))


def _document(cluster: PDCluster) -> dict[str, Any]:
    """With defaults, except in a role's engine, whose values override `spec.engine`."""
    document = cluster.model_dump(mode="json", by_alias=True)
    for name, role in cluster.spec.roles.present().items():
        document["spec"]["roles"][name]["engine"] = role.engine.model_dump(
            mode="json", by_alias=True, exclude_unset=True
        )
    return document


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), inner)
    elif _is_named(value):
        for entry in value:
            yield from _leaves(
                f"{path}[{entry['name']}]",
                {key: inner for key, inner in entry.items() if key != "name"},
            )
    elif value not in (None, []):
        yield path, value


def _is_named(value: Any) -> bool:
    """A list of entries with names, such as pools; not in a pod template."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(entry, dict) and "name" in entry for entry in value)
    )


_NEW_CLUSTER = "make a new PDCluster"


def immutable_faults(old: PDCluster, new: PDCluster) -> tuple[Fault, ...]:
    return (*_etcd(old, new), *_pools(old, new), *_accelerators(old, new))


def _etcd(old: PDCluster, new: PDCluster) -> Iterator[Fault]:
    before, after = old.spec.discovery.etcd, new.spec.discovery.etcd
    if bool(before.endpoints) != bool(after.endpoints):
        reason = (
            "an etcd of your own and one that is run for the cluster cannot be exchanged for each "
            "other"
        )
        yield Fault("spec.discovery.etcd.endpoints", reason, _NEW_CLUSTER)
    if before.replicas != after.replicas:
        yield Fault(
            "spec.discovery.etcd.replicas",
            f"cannot change from {before.replicas} to {after.replicas}",
            _NEW_CLUSTER,
        )
    if before.storage != after.storage:
        yield Fault("spec.discovery.etcd.storage", "cannot change", _NEW_CLUSTER)


def _pools(old: PDCluster, new: PDCluster) -> Iterator[Fault]:
    known = {
        (role, pool.name): pool
        for role, declared in old.spec.roles.present().items()
        for pool in declared.pools
    }
    for role, declared in new.spec.roles.present().items():
        for index, pool in enumerate(declared.pools):
            before = known.get((role, pool.name))
            if before is not None:
                yield from _pool(before, pool, f"spec.roles.{role}.pools[{index}]")


def _pool(old: PoolSpec, new: PoolSpec, path: str) -> Iterator[Fault]:
    values = {"gpu": (old.gpu, new.gpu)}
    if new.gpu != NO_ACCELERATOR:
        before, after = (str(each.gpus_per_replica or "unset") for each in (old, new))
        values["gpusPerReplica"] = (before, after)
    for field, (before, after) in values.items():
        if before != after:
            reason = f"of the pool {new.name} cannot change from {before} to {after}"
            fix = "add a pool under another name, and remove this one"
            yield Fault(f"{path}.{field}", reason, fix)


def _accelerators(old: PDCluster, new: PDCluster) -> Iterator[Fault]:
    before = old.spec.accelerators
    for name, definition in new.spec.accelerators.items():
        if name in before and _place(definition) != _place(before[name]):
            yield Fault(
                f"spec.accelerators.{name}",
                "the definition of an accelerator cannot change",
                "add a type under another name, and pools of it",
            )


def _place(definition: AcceleratorSpec) -> tuple[str | None, dict[str, str]]:
    """The part of a definition that pods are made of."""
    return definition.resource, definition.node_labels


LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def without_others(old: PDCluster, new: PDCluster) -> PDCluster:
    """The object that is there, without annotations and labels that `kubectl apply` would leave:
    neither the new file nor the one that was applied before has them.
    """
    try:
        applied = json.loads(old.metadata.annotations.get(LAST_APPLIED, "{}"))["metadata"]
    except (ValueError, LookupError, TypeError):
        applied = {}
    kept = {}
    for field in ("annotations", "labels"):
        ours = {*getattr(new.metadata, field), *(applied.get(field) or {})} - {LAST_APPLIED}
        found = getattr(old.metadata, field)
        kept[field] = {name: value for name, value in found.items() if name in ours}
    return old.model_copy(update={"metadata": old.metadata.model_copy(update=kept)})


def identity_faults(old: PDCluster, new: PDCluster) -> tuple[Fault, ...]:
    found = []
    for field in ("name", "namespace"):
        before, after = getattr(old.metadata, field), getattr(new.metadata, field)
        if before != after:
            reason = (
                f"is {after!r}, and {before!r} in the file to compare with: that is another object"
            )
            found.append(Fault(f"metadata.{field}", reason, "compare two files of one object"))
    return tuple(found)
