"""Apply the actions of `diff`, stage by stage; the objects of one stage are written concurrently. A
refused object stops only the workloads that need it (`blocked`). While a Service is not as it
should be nothing is deleted, since requests may still go there.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import (
    ClusterError,
    ConflictError,
    UnavailableError,
    UnmadeServiceError,
    UnsettledError,
    failure_of,
)
from pdcluster_api.apiserver.kinds import SECRET, SERVICE
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_operator.writes import blocked
from pdcluster_operator.writes.actions import Action, is_deferred, is_early, stages
from pdcluster_operator.writes.one_action import OnResponse, carry_out

logger = logging.getLogger(__name__)

# Objects written at a time by one reconcile: more make none shorter, and delay other requests
MAX_AT_ONCE = 8


async def apply(
    client: ApiClient, actions: Iterable[Action], on_response: OnResponse = lambda kind, body: None
) -> list[WriteFailure]:
    """Apply all actions; returns what the API server refused, in the order of the stages.
    on_response: called with every object as the API server returned it after a write, for a cache
    Raises UnavailableError when the server cannot be used, having begun nothing more; and
    UnsettledError at the end when an object kept changing: in both cases reconcile again.
    """
    failures: list[WriteFailure] = []
    conflict: ConflictError | None = None
    hold_deletes = False
    missing: list[blocked.MissingDependency] = []
    left = stages(actions)
    while left:
        stage, *left = left
        if hold_deletes and is_deferred(stage[0]):
            continue
        waiting = [
            failure for action in stage if (failure := blocked.blocked_failure(action, missing))
        ]
        failures += waiting
        held = {failure.object for failure in waiting}
        run = _Stage(client, [action for action in stage if str(action) not in held], on_response)
        for action, error, unwritten in await run.run():
            is_missing = blocked.is_missing_dependency(action, error)
            failure = failure_of(error, str(action))
            missing += [
                blocked.MissingDependency(each, failure)
                for each in (action, *unwritten)
                if is_missing
            ]
            hold_deletes |= action.kind is SERVICE or is_missing
            if isinstance(error, ConflictError):
                conflict = error
            else:
                failures.append(blocked.naming_dependents(failure) if is_missing else failure)
                logger.warning(
                    "refused verb=%s object=%s namespace=%s error=%s",
                    action.verb.value,
                    action,
                    action.namespace,
                    error,
                )
        if run.postponed:
            left = stages(action for each in (run.postponed, *left) for action in each)
    if conflict is not None:
        raise UnsettledError(str(conflict), failures) from conflict
    return failures


@dataclass
class _Stage:
    """Actions that are carried out at the same time."""

    client: ApiClient
    actions: Sequence[Action]
    on_response: OnResponse
    postponed: list[Action] = field(default_factory=list)  # what is left of them for a later stage
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_AT_ONCE))
    # by position of the action, with the Secrets that were left out after it
    _errors: dict[int, tuple[ClusterError, list[Action]]] = field(default_factory=dict)
    _unavailable: UnavailableError | None = None
    # no answer to the making of a Service; others are not begun after that
    _unmade: UnavailableError | None = None

    async def run(self) -> list[tuple[Action, ClusterError, list[Action]]]:
        """Returns those that failed, in their order, with what was left out after each.  Raises
        UnavailableError when what is under way has ended.
        """
        async with asyncio.TaskGroup() as group:
            for positions in _chains(self.actions):
                group.create_task(self._run_chain(positions))
        if self._unavailable is not None:
            raise self._unavailable
        return [
            (self.actions[position], *self._errors[position]) for position in sorted(self._errors)
        ]

    async def _run_chain(self, positions: Sequence[int]) -> None:
        for number, position in enumerate(positions, start=1):
            action = self.actions[position]
            async with self._slots:
                if self._unavailable is not None:
                    return
                try:
                    if self._unmade is not None and is_early(action):
                        raise UnmadeServiceError(f"waits for another Service: {self._unmade}")
                    rest = await carry_out(self.client, action, self.on_response)
                    self.postponed += [rest] if rest else []
                except UnavailableError as e:
                    if not is_early(action):
                        self._unavailable = e
                        continue
                    self._unmade = e
                    self._errors[position] = UnmadeServiceError(str(e)), []
                except ClusterError as e:
                    # What is signed by an authority that is not stored would be signed again in
                    # each reconcile.
                    unwritten = [self.actions[each] for each in positions[number:]]
                    self._errors[position] = e, unwritten
                    return


def _chains(actions: Sequence[Action]) -> list[list[int]]:
    """Positions of actions that go one after the other; chains go at the same time.  An authority
    and what it signs differ in the last word of their names.
    """
    pairs: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for position, action in enumerate(actions):
        if action.kind is SECRET:
            pairs[action.namespace, action.name.rpartition("-")[0]].append(position)
    return [
        *pairs.values(),
        *([position] for position, action in enumerate(actions) if action.kind is not SECRET),
    ]
