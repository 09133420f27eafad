"""Objects that somebody else writes as often as we put them back: after some times that is said instead, and left for the back-off.

Two writers who each insist would otherwise go on for ever, as fast as the API
server lets them.  The same content, written again and again to the same object,
is the sign of it: what we wish otherwise each time, as a size, counts anew.
"""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdcluster_operator.api import conditions
from pdcluster_operator.cluster.cache import Body
from pdcluster_operator.cluster.converge import Action, Verb
from pdcluster_operator.cluster.differences import writers
from pdcluster_operator.cluster.kinds import SERVICE
from pdcluster_operator.plan.state import Failure

MAX_WRITES = 10
WINDOW_SECONDS = 300.0
"""More writes in this time than a person makes by hand, and few enough to be no load."""

_PUTS_BACK = frozenset({Verb.APPLY, Verb.TAKE_OVER, Verb.PATCH})


@dataclass
class Contested:
    """Remembers when the same was written to the same object."""

    clock: Callable[[], float] = time.monotonic
    _written: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def sift(self, actions: Iterable[Action], children: Iterable[Body]) -> tuple[list[Action], list[Failure]]:
        """What is to be carried out now, and a failure for each object that was put back too often.

        Nothing is deleted while a Service is not as it should be.
        """
        self._forget_old()
        actions = list(actions)
        fought = [action for action in actions if len(self._written.get(_what(action), ())) >= MAX_WRITES]
        if not fought:
            return actions, []
        bodies = {str(body["metadata"]["uid"]): body for body in children}
        hold_deletes = any(action.kind is SERVICE for action in fought)
        left = [action for action in actions if action not in fought and not (hold_deletes and action.verb is Verb.DELETE)]
        return left, [_failure(action, bodies.get(str(action.uid))) for action in fought]

    def written(self, actions: Iterable[Action], refused: Collection[Failure]) -> None:
        """These were carried out, but for what was refused."""
        names = {failure.object for failure in refused}
        for action in actions:
            if action.verb in _PUTS_BACK and str(action) not in names:
                self._written.setdefault(_what(action), []).append(self.clock())

    def _forget_old(self) -> None:
        least = self.clock() - WINDOW_SECONDS
        kept = ((what, [when for when in times if when > least]) for what, times in self._written.items())
        self._written = {what: times for what, times in kept if times}


def _what(action: Action) -> tuple[str, str]:
    content: Mapping[str, Any] = action.patch or action.desired
    return str(action.uid), hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _failure(action: Action, live: Body | None) -> Failure:
    names = ", ".join(writers(action.kind, live) if live else ()) or "another writer"
    message = (
        f"{names} writes what the operator has to put back ({MAX_WRITES} times within {WINDOW_SECONDS:.0f} s); "
        f"let {names} leave {action} alone"
    )
    return Failure(object=str(action), reason=conditions.APPLY_FAILED, message=message)
