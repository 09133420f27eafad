"""Actions on the children of a PDCluster, and which of them need not wait for each other.  Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any, NamedTuple

from pdcluster_api.apiserver.kinds import (
    CHILDREN,
    MAKE_PODS,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    STATEFUL_SET,
    Kind,
)

# Place of each kind in the order in which children are made
POSITIONS = {kind.name: position for position, kind in enumerate(CHILDREN)}


class Verb(Enum):
    """Action on an object."""

    CREATE = "create"  # make it; nothing of that name is known
    APPLY = "apply"  # server-side apply to the object that is there
    PATCH = "patch"  # merge-patch what differs
    REPLACE = "replace"  # delete it and create it again, since it is immutable
    DELETE = "delete"  # it is not wanted, or not as the one that is being deleted
    REFUSE = "refuse"  # an object of that name is not ours: a failure to report


class ObjectName(NamedTuple):
    """Kind and name of a child, within the namespace of its PDCluster."""

    kind: str
    name: str


@dataclass(frozen=True)
class Action:
    """One thing to do."""

    verb: Verb
    kind: Kind
    namespace: str
    name: str
    desired: Mapping[str, Any]  # the prepared manifest; empty for DELETE
    uid: str | None = None  # of the live object; None for CREATE and REFUSE
    patch: Mapping[str, Any] | None = None  # for PATCH
    rewrite: bool = False  # the content of a KEPT object is to be written too
    # for DELETE: the object stays, as one that is being deleted, until its dependents are gone
    foreground: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def stages(actions: Iterable[Action]) -> list[Sequence[Action]]:
    """Actions that need not wait for each other, stage by stage.  First the needs of a pod, and
    Services that are not there, by which no request goes anywhere else; then StatefulSets, then
    Services that change; then deletions: StatefulSets, and all that they use. A disruption budget
    is deleted first of all.
    """
    return [list(stage) for _, stage in groupby(sorted(actions, key=_stage), key=_stage)]


def is_deferred(action: Action) -> bool:
    """Return whether an action is a deletion that waits for what is made.  An old disruption budget
    does not wait: no pod under two budgets is ever evicted.
    """
    return action.verb is Verb.DELETE and action.kind is not POD_DISRUPTION_BUDGET


def is_early(action: Action) -> bool:
    """Return whether an action on a Service need not wait for StatefulSets: it is not there yet."""
    return action.kind is SERVICE and action.verb is Verb.CREATE


def _stage(action: Action) -> tuple[bool, int]:
    makes_pods = action.kind in MAKE_PODS
    if is_deferred(action):
        return True, int(not makes_pods)
    if makes_pods:
        return False, 0
    is_before = POSITIONS[action.kind.name] < POSITIONS[STATEFUL_SET.name]
    return False, -1 if is_early(action) or is_before else 1
