"""Blocks StatefulSets whose Secret, ServiceAccount or NetworkPolicy is missing or not ours: their
pods would have a foreign identity or key, or open ports. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pdcluster_api.apiserver.errors import ClusterError, NameTakenError
from pdcluster_api.apiserver.kinds import MAKE_PODS, NETWORK_POLICY, SECRET, SERVICE_ACCOUNT
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_operator.writes.actions import Action, Verb

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
    return action.kind in NEEDED and (
        action.verb is Verb.CREATE or isinstance(error, NameTakenError)
    )


def naming_dependents(failure: WriteFailure) -> WriteFailure:
    return replace(failure, message=f"{failure.message}; {_WAITS}")


def blocked_failure(action: Action, missing: Iterable[MissingDependency]) -> WriteFailure | None:
    """Failure of a StatefulSet whose pods would use a missing object; None = go on."""
    if action.kind not in MAKE_PODS or action.verb is Verb.DELETE:
        return None
    found = next(
        (each for each in missing if _uses(action.desired["spec"]["template"], each.action)), None
    )
    return (
        None
        if found is None
        else WriteFailure(
            str(action), found.cause.reason, f"waits for {found.cause.object}", waits=True
        )
    )


def _uses(template: Mapping[str, Any], action: Action) -> bool:
    pod: Mapping[str, Any] = template.get("spec") or {}
    if action.kind is SERVICE_ACCOUNT:
        return bool(pod.get("serviceAccountName") == action.name)
    if action.kind is SECRET:
        return action.name in _secrets(pod)
    return _selects(
        action.desired["spec"]["podSelector"], (template.get("metadata") or {}).get("labels") or {}
    )


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
