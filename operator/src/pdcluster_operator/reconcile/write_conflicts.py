"""Detect write fights: another writer changes or deletes what we revert, again and again. After
`MAX_WRITES` equal writes in a window it is reported, and written once per window until the object
has stayed as it should be for `SETTLED_SECONDS`.
"""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdcluster_api.apiserver.kinds import SERVICE, Body
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_operator.writes.actions import Action, ObjectName, Verb, is_deferred
from pdcluster_operator.writes.drift import conflicting_managers, writers
from pdcluster_schema import conditions
from pdcluster_schema.labels import APPLIED

MAX_WRITES = 10
# Window of a fight: more writes than by hand, and few enough to be no load; then one per window
WINDOW_SECONDS = 300.0

# The other writer comes again within this time, or there would not be so many writes
SETTLED_SECONDS = WINDOW_SECONDS / MAX_WRITES

_REVERTS = frozenset({Verb.CREATE, Verb.APPLY, Verb.PATCH, Verb.REPLACE})


@dataclass
class _WriteConflict:
    """failure: its report; tried: time of the last write, by the digest of its content."""

    failure: WriteFailure
    tried: dict[str, float] = field(default_factory=dict)


@dataclass
class WriteConflicts:
    """Times of equal writes to the objects of one PDCluster, and those that are fought over."""

    clock: Callable[[], float] = time.monotonic
    # of each object the digest of its last write, and the times of the same one before any other
    _written: dict[ObjectName, tuple[str, list[float]]] = field(default_factory=dict)
    _conflicts: dict[ObjectName, _WriteConflict] = field(default_factory=dict)

    def sift(
        self, actions: Iterable[Action], children: Iterable[Body]
    ) -> tuple[list[Action], list[WriteFailure]]:
        """Actions to carry out now, and a failure for each object that is fought over.  Such an
        object is written once in a window. Nothing is deleted while a Service is among them.
        """
        actions, now = list(actions), self.clock()
        self._forget_old(now)
        reverts = {_name(action): action for action in actions if action.verb in _REVERTS}
        # one is over when the other writer would have come again since
        self._conflicts = {
            name: conflict
            for name, conflict in self._conflicts.items()
            if name in reverts
            or any(now - when <= SETTLED_SECONDS for when in conflict.tried.values())
        }
        bodies = {str(body["metadata"]["uid"]): body for body in children}
        for name, action in reverts.items():
            digest = _digest(action)
            times = self._times(name, digest)
            if name not in self._conflicts and len(times) >= MAX_WRITES:
                failure = _failure(action, bodies.get(str(action.uid)))
                self._conflicts[name] = _WriteConflict(failure, {digest: times[-1]})
        hold_deletes = any(name.kind == SERVICE.name for name in self._conflicts)
        left = [
            action
            for action in actions
            if not (hold_deletes and is_deferred(action)) and self._may(action, now)
        ]
        return left, [conflict.failure for conflict in self._conflicts.values()]

    def written(self, actions: Iterable[Action], refused: Collection[WriteFailure]) -> None:
        """These were carried out, or at least tried again and again, but for what was refused."""
        names, now = {failure.object for failure in refused}, self.clock()
        for action in actions:
            if action.verb in _REVERTS and str(action) not in names:
                name, digest = _name(action), _digest(action)
                self._written[name] = digest, [*self._times(name, digest), now]

    def _times(self, name: ObjectName, digest: str) -> list[float]:
        """Times of the same write to the object, since any other write."""
        last, times = self._written.get(name, ("", []))
        return times if last == digest else []

    def _may(self, action: Action, now: float) -> bool:
        conflict = self._conflicts.get(_name(action))
        if conflict is None or action.verb not in _REVERTS:
            return True
        digest, tried = _digest(action), conflict.tried
        conflict.tried = {key: when for key, when in tried.items() if now - when < WINDOW_SECONDS}
        if digest in conflict.tried:
            return False
        conflict.tried[digest] = now
        return True

    def _forget_old(self, now: float) -> None:
        self._written = {
            name: (digest, kept)
            for name, (digest, times) in self._written.items()
            if (kept := [when for when in times if now - when < WINDOW_SECONDS])
        }


def _name(action: Action) -> ObjectName:
    return ObjectName(action.kind.name, action.name)


def _digest(action: Action) -> str:
    content: Mapping[str, Any] = action.patch or action.desired
    applied: str | None = content.get("metadata", {}).get("annotations", {}).get(APPLIED)
    return applied or hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _failure(action: Action, live: Body | None) -> WriteFailure:
    found = (conflicting_managers(live, action.desired) or writers(live)) if live else ()
    names = ", ".join(found) or "another writer"
    does = "deletes" if action.verb is Verb.CREATE else "writes"
    message = (
        f"{names} {does} what the operator has to revert ({MAX_WRITES} times within "
        f"{WINDOW_SECONDS:.0f} s); let {names} leave {action} alone"
    )
    return WriteFailure(object=str(action), reason=conditions.APPLY_FAILED, message=message)
