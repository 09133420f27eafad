"""The revision and the templates that a spec runs as, by the snapshots that there are. Pure.

A role keeps its pods while its snapshot is as the spec has it.  If at least one role does, and
nothing has changed that roles have to have in common, the others follow within the revision, each
under another template: its workers pair with those of the roles that stay.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pdcluster_schema.labels import PAIR_HASH, ROLE_HASH, TEMPLATE_HASH
from pdcluster_schema.pdcluster import PDCluster, PDClusterSpec
from pdcluster_schema.revision import (
    at_revision,
    pair_hash,
    revision_of,
    role_hash,
    template_hash,
    template_name,
    templates_of,
    written_names,
)
from pdcluster_schema.sections import ENGINELESS
from pdcluster_schema.workload import WorkloadId


@dataclass(frozen=True)
class Snapshot:
    """Record of a workload with an engine, as far as it tells the spec that it was made of.

    hashes: by label; those of older operators lack some
    """

    workload: WorkloadId
    hashes: Mapping[str, str]
    is_retired: bool = False  # its workload was replaced


def snapshot_hashes(spec: PDClusterSpec, role: str) -> dict[str, str]:
    """Labels by which a snapshot is found again."""
    found = {TEMPLATE_HASH: template_hash(spec, role)}
    if role in ENGINELESS:
        return found
    return {**found, PAIR_HASH: pair_hash(spec), ROLE_HASH: role_hash(spec, role)}


def snapshots_of(cluster: PDCluster) -> list[Snapshot]:
    """The snapshots of a cluster that is as declared."""
    spec, templates = cluster.spec, templates_of(cluster.spec)
    return [
        Snapshot(
            WorkloadId(
                *(cluster.metadata.name, role, pool.name, revision_of(spec)),
                templates.get(role, ""),
            ),
            snapshot_hashes(spec, role),
        )
        for role, declared in spec.roles.computing().items()
        for pool in declared.pools
    ]


def continued(
    cluster: PDCluster,
    snapshots: Collection[Snapshot],
    unrecorded: Mapping[WorkloadId, bool] = MappingProxyType({}),
) -> PDCluster:
    """The cluster under the revision whose workers are what its spec asks for, if any run, or
    which it changes some roles of.  An older operator's snapshots say so by their revision alone,
    which names the spec as written.

    unrecorded: workloads without a snapshot, and whether they end
    """
    hashed, names = template_hash(cluster.spec), written_names(cluster.spec)
    revisions = {each.workload.revision for each in snapshots}
    same = {
        each.workload.revision for each in snapshots if each.hashes.get(TEMPLATE_HASH) == hashed
    }
    older = {each.workload.revision for each in snapshots if TEMPLATE_HASH not in each.hashes}
    named = (each for each in names if each in older)
    found = min(same, default=None) or next(named, None) or _paired(cluster.spec, snapshots)
    if found is None and names[0] in revisions:
        found = hashed  # its own name is that of other pods
    if found is None:
        return cluster
    own = [each for each in snapshots if each.workload.revision == found]
    roles = cluster.spec.roles.computing()
    templates = {role: _template(cluster.spec, role, found, own) for role in roles}
    lost = {role for role in roles if all(each.workload.role != role for each in own)}
    for workload, ends in sorted(unrecorded.items()):
        if workload.role in lost and workload.revision == found:
            # what runs gets its snapshot again; what ends makes room for others
            templates[workload.role] = (
                template_name(cluster.spec, workload.role, found) if ends else workload.template
            )
    return at_revision(cluster, found, templates)


def _paired(spec: PDClusterSpec, snapshots: Collection[Snapshot]) -> str | None:
    """The revision of which most roles, and at least one, are as the spec has them; rather one
    that runs.
    """
    kept: defaultdict[str, set[str]] = defaultdict(set)
    for each in snapshots:
        role = each.workload.role
        if role in spec.roles.computing() and _is_as_declared(spec, each):
            kept[each.workload.revision].add(role)
    running = {each.workload.revision for each in snapshots if not each.is_retired}
    return min(
        kept,
        key=lambda revision: (-len(kept[revision]), revision not in running, revision),
        default=None,
    )


def _is_as_declared(spec: PDClusterSpec, snapshot: Snapshot) -> bool:
    declared = snapshot_hashes(spec, snapshot.workload.role)
    return all(snapshot.hashes.get(label) == declared[label] for label in (PAIR_HASH, ROLE_HASH))


def _template(
    spec: PDClusterSpec, role: str, revision: str, snapshots: Collection[Snapshot]
) -> str:
    """That of the role's snapshot that is as declared, else a new one.  snapshots: of the
    revision
    """
    mine = [each for each in snapshots if each.workload.role == role]
    known = [each for each in mine if ROLE_HASH in each.hashes]
    as_declared = [each.workload.template for each in known if _is_as_declared(spec, each)]
    if as_declared:
        return min(as_declared)
    # of an older operator, which replaced all roles together
    return template_name(spec, role, revision) if known else ""
