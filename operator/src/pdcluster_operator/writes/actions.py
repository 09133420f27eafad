"""Actions on the children of a PDCluster, and which of them need not wait for each other.  Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import Any, NamedTuple

from pdcluster_api.apiserver.errors import ClusterError, NameTakenError
from pdcluster_api.apiserver.kinds import (
    CHILDREN,
    MAKE_PODS,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    STATEFUL_SET,
    Kind,
)
from pdcluster_api.plan.observed.state import WriteFailure

# Place of each kind in the order in which children are made
POSITIONS = {kind.name: position for position, kind in enumerate(CHILDREN)}


class Verb(Enum):
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


# The kinds without which no pod is to be made
NEEDED = frozenset({SERVICE_ACCOUNT, SECRET, NETWORK_POLICY})

_WAITS = "until then no StatefulSet that would use it is made or changed, and nothing is deleted"


@dataclass(frozen=True)
class MissingDependency:
    """An object that pods need and that is not there as ours."""

    action: Action  # what was to be written
    cause: WriteFailure  # what was refused; of a Secret that was not even tried, its authority


def is_missing_dependency(action: Action, error: ClusterError) -> bool:
    """True for a failed action that leaves pods without what they need.  An object that is ours,
    and could not be changed, is there all the same.
    """
    is_absent = action.verb is Verb.CREATE or isinstance(error, NameTakenError)
    return action.kind in NEEDED and is_absent


def naming_dependents(failure: WriteFailure) -> WriteFailure:
    return replace(failure, message=f"{failure.message}; {_WAITS}")


def blocked_failure(action: Action, missing: Iterable[MissingDependency]) -> WriteFailure | None:
    """Failure of a StatefulSet whose pods would use a missing object; None = go on."""
    if action.kind not in MAKE_PODS or action.verb is Verb.DELETE:
        return None
    template = action.desired["spec"]["template"]
    for each in missing:
        if _uses(template, each.action):
            waits = f"waits for {each.cause.object}"
            return WriteFailure(str(action), each.cause.reason, waits, waits=True)
    return None


def _uses(template: Mapping[str, Any], action: Action) -> bool:
    pod: Mapping[str, Any] = template.get("spec") or {}
    if action.kind is SERVICE_ACCOUNT:
        return bool(pod.get("serviceAccountName") == action.name)
    if action.kind is SECRET:
        return action.name in _secrets(pod)
    marks = (template.get("metadata") or {}).get("labels") or {}
    return _selects(action.desired["spec"]["podSelector"], marks)


def _secrets(pod: Mapping[str, Any]) -> set[str]:
    volumes = pod.get("volumes") or ()
    sources = [
        source
        for each in volumes
        for source in (each, *((each.get("projected") or {}).get("sources") or ()))
    ]
    return {
        str(secret.get("secretName") or secret.get("name"))
        for each in sources
        if (secret := each.get("secret"))
    }


def _selects(selector: Mapping[str, Any], marks: Mapping[str, str]) -> bool:
    """By the two ways in which our own policies select."""
    required, present = selector.get("matchLabels") or {}, selector.get("matchExpressions") or ()
    return all(marks.get(key) == value for key, value in required.items()) and all(
        each["key"] in marks for each in present
    )
