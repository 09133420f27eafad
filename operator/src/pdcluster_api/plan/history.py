"""Revisions that have served with all their workers: the newest, and the one before it. Pure.

The memory is `status.history`.  Where others have taken the place of one, its snapshots stay
without StatefulSets, until another one has served after it: `pdctl rollout undo` goes back to it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_api.plan.inputs import PlanInputs
from pdcluster_api.plan.observed.pools import DeclaredRevision
from pdcluster_api.plan.observed.state import mappings
from pdcluster_schema.text import and_more
from pdcluster_schema.workload import PoolKey, WorkloadId

FIELD = "history"
_LIMIT = 2  # entries: the last one, and the one before it


@dataclass(frozen=True)
class ServedRevision:
    revision: DeclaredRevision
    since: str  # RFC 3339, when all its workers were ready for the first time


History = tuple[ServedRevision, ...]
"""Newest first."""


def read_history(status: Mapping[str, Any]) -> History:
    """Entries of the last status; one that cannot be read counts as never written."""
    return tuple(
        ServedRevision(DeclaredRevision(each["revision"], dict(templates)), each["since"])
        for each in mappings(status.get(FIELD))
        if all(isinstance(each.get(name), str) for name in ("revision", "since"))
        and isinstance(templates := each.get("templates", {}), Mapping)
    )[:_LIMIT]


def history_field(history: History) -> dict[str, Any]:
    entries = [
        {"revision": each.revision.revision, "since": each.since}
        | ({"templates": dict(each.revision.templates)} if each.revision.templates else {})
        for each in history
    ]
    return {FIELD: entries} if entries else {}


def next_history(before: History, declared: DeclaredRevision, now: str) -> History:
    """The history once the declared revision serves with all its workers.  now: RFC 3339"""
    if before and before[0].revision == declared:
        return before
    others = (each for each in before if each.revision != declared)
    return (ServedRevision(declared, now), *others)[:_LIMIT]


def kept_snapshots(
    history: History, known: Iterable[WorkloadId], pools: Collection[PoolKey]
) -> set[WorkloadId]:
    """Those of the history, without those of pools that are no longer declared."""
    return {
        each
        for each in known
        if (each.role, each.pool) in pools and any(one.revision.has(each) for one in history)
    }


def way_back(inputs: PlanInputs) -> DeclaredRevision | str:
    """The revision to which the cluster can go back, or why it cannot."""
    history, observed = read_history(inputs.observed.status), inputs.observed
    others = (each.revision for each in history if each.revision != inputs.declared)
    found = next(others, None) or _replaced(inputs)
    if found is None:
        return f"no other revision than {inputs.rollout_name} has served with all its workers"
    states = (state.id for state in observed.workloads if not state.gone)
    known = (*states, *observed.records, *observed.retired)
    kept = {(each.role, each.pool) for each in known if found.has(each)}
    if not kept:
        return f"the snapshots of revision {found} are gone"
    pools = (size for size in inputs.sizes if size.key not in kept)
    if lacking := [f"{size.role} pool {size.pool.name}" for size in pools]:
        return f"revision {found} has no snapshot of {lacking[0]}{and_more(len(lacking))}"
    return found


def _replaced(inputs: PlanInputs) -> DeclaredRevision | None:
    """Find what others take the place of, where no revision has had all its workers yet."""
    states = inputs.existing.of_revision(inputs.current)
    others = [each for each in states if not (each.gone or inputs.declared.has(each.id))]
    if inputs.current is None or not others:
        return None
    is_same = inputs.current == inputs.target  # roles that have not changed go on
    by_role = dict(inputs.declared.templates) if is_same else {}
    for each in sorted(others, key=lambda state: (state.desired, state.id)):
        by_role[each.id.role] = each.id.template
    return DeclaredRevision(inputs.current, {role: each for role, each in by_role.items() if each})
