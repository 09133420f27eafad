"""Progress of a rollout, and its deadline. Pure; the status is its memory. It progresses when more
new workers are ready than ever before in it, or fewer old pods are left. One that stalls beside a
revision that answers is rolled back, once, at the deadline.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_schema.conditions import NAME_TAKEN

FIELD = "rollout"


@dataclass(frozen=True)
class Rollout:
    """A roll out that is under way, as the status has it."""

    revision: str  # the new one
    deadline: int  # spec.rollout.progressDeadlineSeconds when it began
    ready: int = 0  # most workers of it that were ready at a time
    left: int = 0  # fewest pods of the old one that were left, where these have to end first
    # RFC 3339, when it last came forward; None = the clock stands: it cannot even begin
    since: str | None = None
    # why it does not come forward, as it was found at the deadline; None = it does
    stalled: str | None = None
    # another one answered requests then, so this one is to have no workers
    rolled_back: bool = False


@dataclass(frozen=True)
class RolloutState:
    """The roll out to the declared revision, in one reconcile."""

    revision: str
    deadline: int
    ready: int
    left: int
    is_under_way: bool  # the revision is new, or another one still serves or ends
    has_fallback: bool  # another one is selected, and goes on until this one is whole
    # by ready workers of that other one, so that there is something to go back to
    is_answered: bool
    is_done: bool  # it takes over, or has
    is_whole: bool  # it has all its workers, and waits for something else
    is_blocked: bool  # another owner's object has a name that it needs, so nothing of it is made
    missing: str  # missing parts of the workers, as text


def read_rollout(status: Mapping[str, Any]) -> Rollout | None:
    """The roll out that the last status speaks of; None = none, or nothing that can be read."""
    found = status.get(FIELD)
    if not isinstance(found, Mapping):
        return None
    try:
        since = found.get("progressedAt")
        if since is not None:
            datetime.fromisoformat(since)
        deadline, ready, left = (
            int(found[name]) for name in ("progressDeadlineSeconds", "ready", "left")
        )
        stalled, rolled_back = found.get("stalled"), found.get("givenUp") is True
        return Rollout(str(found["revision"]), deadline, ready, left, since, stalled, rolled_back)
    except (KeyError, TypeError, ValueError):
        return None


def rollout_field(rollout: Rollout | None) -> dict[str, Any]:
    if rollout is None:
        return {}
    others = {
        "progressedAt": rollout.since,
        "stalled": rollout.stalled,
        "givenUp": rollout.rolled_back or None,
    }
    numbers = {
        "progressDeadlineSeconds": rollout.deadline,
        "ready": rollout.ready,
        "left": rollout.left,
    }
    return {
        FIELD: {
            "revision": rollout.revision,
            **numbers,
            **{name: value for name, value in others.items() if value is not None},
        }
    }


def is_rolled_back(
    rollout: Rollout | None, revision: str, deadline: int, *, has_fallback: bool
) -> bool:
    """True if a revision is to have no workers: it was given up, and the other one is there."""
    if rollout is None or (rollout.revision, rollout.deadline) != (revision, deadline):
        return False
    return has_fallback and rollout.rolled_back


def next_rollout(before: Rollout | None, state: RolloutState, now: str) -> Rollout | None:
    """The roll out after a reconcile; None = none is under way.  now: RFC 3339"""
    is_same = before is not None and (before.revision, before.deadline) == (
        state.revision,
        state.deadline,
    )
    if before is not None and is_rolled_back(
        before, state.revision, state.deadline, has_fallback=state.has_fallback
    ):
        return before
    if state.is_done or not (before or state.is_under_way):
        return None
    fresh = Rollout(
        state.revision, state.deadline, state.ready, state.left, None if state.is_blocked else now
    )
    if (
        before is None
        or not is_same
        or before.since is None
        or before.rolled_back
        or state.is_blocked
    ):
        return fresh
    if state.ready > before.ready or state.left < before.left:
        return replace(
            fresh, ready=max(state.ready, before.ready), left=min(state.left, before.left)
        )
    if state.is_whole or _age(before.since, now) < before.deadline:
        return replace(before, stalled=None)
    is_rolled_back_now = before.stalled is None and state.has_fallback and state.is_answered
    return replace(before, stalled=state.missing, rolled_back=is_rolled_back_now)


def seconds_left(rollout: Rollout | None, now: str) -> float | None:
    """Seconds until a rollout has stalled; None = its clock stands, or it has."""
    if rollout is None or rollout.since is None or rollout.stalled is not None:
        return None
    left = rollout.deadline - _age(rollout.since, now)
    return left if left > 0 else None  # beyond the deadline something else is waited for


def _age(since: str, now: str) -> float:
    return (datetime.fromisoformat(now) - datetime.fromisoformat(since)).total_seconds()


_NEEDED = frozenset(
    {
        "ServiceAccount",
        "Secret",
        "ConfigMap",
        "ControllerRevision",
        "NetworkPolicy",
        "Deployment",
        "StatefulSet",
        "Service",
    }
)


def is_blocked(failures: Iterable[WriteFailure], cluster: str) -> bool:
    """True if a name is taken of an object that workers, their etcd or their clients need.

    cluster: name of the PDCluster

    >>> is_blocked([WriteFailure("Secret chat-pdc-tls", NAME_TAKEN, "exists")], "chat")
    True
    >>> is_blocked([WriteFailure("PodDisruptionBudget chat", NAME_TAKEN, "exists")], "chat")
    False
    """
    # Workers find each other by their IPs, not by the names of their headless Service.
    conflicting = [failure.object for failure in failures if failure.reason == NAME_TAKEN]
    return any(
        each.partition(" ")[0] in _NEEDED and each != f"Service {cluster}-workers"
        for each in conflicting
    )
