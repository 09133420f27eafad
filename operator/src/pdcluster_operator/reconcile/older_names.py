"""Children under the names of an older operator: they stay while workloads of its use them.

Pure.  A recorded pod template names its Secret and its ServiceAccount, and a
rename must neither restart its pods nor take from under them what they use.
The Secrets are never deleted before their PDCluster is: the operator has no right
to delete any; unused ones are only no longer renewed.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pdcluster_api.apiserver.body import Body
from pdcluster_api.apiserver.observe import Live, workload_of
from pdcluster_api.manifests.child_names import (
    ChildNames,
    child_names,
    mounts,
    older_names,
    runs_as,
)


def service_accounts_in_use(live: Live) -> tuple[str, ...]:
    """Names of the ServiceAccounts that there should be: the new one, and an older one in use."""
    now, before = child_names(live.key.name).service_account, older_names(live.key.name)
    is_used = any(
        _is_older(body, before) and runs_as(spec, before.service_account)
        for body, spec in _templates(live)
    )
    is_left = before.service_account in live.own("ServiceAccount") and _has_pods_without_template(
        live
    )
    return (now, before.service_account) if is_used or is_left else (now,)


def certificates_in_use(live: Live) -> tuple[ChildNames, ...]:
    """Names of the Secrets that there should be; those of older workloads, which work, first."""
    now, before = child_names(live.key.name), older_names(live.key.name)
    is_used = any(mounts(spec, before.certificates) for _, spec in _templates(live))
    return (before, now) if is_used else (now,)


def names_of_revision(cluster: str, records: Iterable[Body], revision: str) -> ChildNames:
    """The names for another workload of a revision.

    Its workers trust one authority, so all have their files from one Secret.
    """
    before = older_names(cluster)
    of_revision = [
        record
        for record in records
        if (found := workload_of(record)) and found.revision == revision
    ]
    return (
        before
        if any(mounts(_recorded(record), before.certificates) for record in of_revision)
        else child_names(cluster)
    )


def _is_older(body: Body, before: ChildNames) -> bool:
    """True if an older operator made it; a podTemplate may have named a worker's ServiceAccount."""
    spec = _recorded(body) if body["kind"] == "ControllerRevision" else body["spec"]
    return workload_of(body) is None or mounts(spec, before.certificates)


def _templates(live: Live) -> Iterator[tuple[Body, Mapping[str, Any]]]:
    """Every recorded or existing StatefulSet, with its spec; and what runs etcd."""
    yield from ((record, _recorded(record)) for record in live.own("ControllerRevision").values())
    for kind in ("StatefulSet", "Deployment"):
        yield from ((body, body["spec"]) for body in live.own(kind).values())


def _has_pods_without_template(live: Live) -> bool:
    """Return whether pods are left whose StatefulSet and snapshot are gone: their needs are
    unknown.
    """
    known = {workload_of(body) for body, _ in _templates(live)}
    return any(workload_of(body) not in known for body in live.children if body["kind"] == "Pod")


def _recorded(record: Body) -> Mapping[str, Any]:
    data = record.get("data") or {}
    made: Mapping[str, Any] = data.get("statefulSet") or data.get("deployment") or {}
    return made.get("spec") or {}
