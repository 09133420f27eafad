"""Changes that the CRD's rules refuse in an existing object, checked early."""

from collections.abc import Iterator

from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.errors import Fault
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.sections import AcceleratorSpec, PoolSpec

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
