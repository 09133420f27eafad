"""Apply actions, stage by stage; the objects of one stage are written concurrently. A refused
object stops only the workloads that need it. While a Service is not as it should be nothing is
deleted, since requests may still go there.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import (
    ClusterError,
    ConflictError,
    MissingKindError,
    NameTakenError,
    NotFoundError,
    UnavailableError,
    UnmadeServiceError,
    UnsettledError,
    failure_of,
)
from pdcluster_api.apiserver.kinds import SECRET, SERVICE, ApplyStrategy, Kind
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_operator.writes.actions import (
    Action,
    MissingDependency,
    Verb,
    blocked_failure,
    is_deferred,
    is_early,
    is_missing_dependency,
    naming_dependents,
    stages,
)
from pdcluster_operator.writes.diff import decide

logger = logging.getLogger(__name__)

# Objects written at a time by one reconcile: more make none shorter, and delay other requests
MAX_AT_ONCE = 8
MAX_DECISIONS = 5  # an object that changes faster than that is left for the next reconcile

# A resourceVersion that no object has, since etcd's first write is its revision 2: an apply with it
# makes, or is a conflict
NO_VERSION = "1"

OnResponse = Callable[[Kind, Mapping[str, Any]], None]


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
    missing: list[MissingDependency] = []
    left = stages(actions)
    while left:
        stage, *left = left
        if hold_deletes and is_deferred(stage[0]):
            continue
        blocked = [blocked_failure(action, missing) for action in stage]
        failures += filter(None, blocked)
        ready = [action for action, failure in zip(stage, blocked, strict=True) if not failure]
        run = _Stage(client, ready, on_response)
        for action, error, unwritten in await run.run():
            is_missing = is_missing_dependency(action, error)
            failure = failure_of(error, str(action))
            if is_missing:
                missing += [MissingDependency(each, failure) for each in (action, *unwritten)]
            hold_deletes |= action.kind is SERVICE or is_missing
            if isinstance(error, ConflictError):
                conflict = error
                continue
            failures.append(naming_dependents(failure) if is_missing else failure)
            logger.warning(
                "refused verb=%s object=%s namespace=%s error=%s",
                *(action.verb.value, action, action.namespace, error),
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
            (self.actions[position], *error) for position, error in sorted(self._errors.items())
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
                    rest = await _carry_out(self.client, action, self.on_response)
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
                    self._errors[position] = e, [self.actions[each] for each in positions[number:]]
                    return


def _chains(actions: Sequence[Action]) -> list[list[int]]:
    """Positions of actions that go one after the other; chains go at the same time.  An authority
    and what it signs differ in the last word of their names.
    """
    chains: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for position, action in enumerate(actions):
        is_secret = action.kind is SECRET
        pair = (action.namespace, action.name.rpartition("-")[0]) if is_secret else (position,)
        chains[pair].append(position)
    return list(chains.values())


async def _carry_out(client: ApiClient, action: Action, on_response: OnResponse) -> Action | None:
    """One action, decided again as often as the object turns out to be another than was thought.
    Returns what is left for a later stage: a Service that was to be made, and is there, changes
    after the StatefulSets.
    """
    following: Action | None = action
    for _ in range(MAX_DECISIONS):
        if following is None:
            return None
        if is_early(action) and following.verb not in (Verb.CREATE, Verb.REFUSE):
            return following
        now = following
        logger.info("%s object=%s namespace=%s", now.verb.value, now, now.namespace)
        try:
            following = await _write(client, now, on_response)
            continue
        except ConflictError as e:
            logger.info(
                "decided again object=%s namespace=%s because=%s", action, action.namespace, e
            )
        except NotFoundError as e:
            if now.verb is Verb.CREATE and action.kind.is_optional:
                kind = action.kind
                message = f"the API server has no kind {kind.kind} ({kind.api_version})"
                fix = f"install its CRD, or remove {kind.field}"
                raise MissingKindError(f"{message}; {fix}") from e
            if now.verb is Verb.CREATE:
                raise
        following = await _decided_again(client, now, on_response)
    if following is not None:
        raise ConflictError(f"{action} was changed by others again and again")
    return None


async def _decided_again(
    client: ApiClient, action: Action, on_response: OnResponse
) -> Action | None:
    live = await client.find(action.kind, action.namespace, action.name)
    if live is None:
        return decide(action.desired, None, rewrite=action.rewrite)
    on_response(action.kind, live)
    desired = action.desired
    if action.kind.strategy is ApplyStrategy.REQUEST and action.verb is Verb.CREATE:
        # a scaler that exists, unexpectedly: its replicas are not to be overwritten
        kept = {key: each for key, each in desired["metadata"].items() if key != "annotations"}
        desired = {
            **{key: each for key, each in desired.items() if key != "spec"},
            "metadata": kept,
        }
    return decide(desired, live, rewrite=action.rewrite)


async def _write(client: ApiClient, action: Action, on_response: OnResponse) -> Action | None:
    kind, namespace, name, uid = action.kind, action.namespace, action.name, str(action.uid)
    written: Mapping[str, Any] | None = None
    match action.verb:
        case Verb.CREATE if kind.strategy in (ApplyStrategy.REQUEST, ApplyStrategy.RECORD):
            written = await client.create(kind, action.desired)
        case Verb.CREATE:
            # Drift is found by the managed fields of an apply.  It alone would quietly add to a
            # foreign object, and none of them is among the children that were observed.
            body = _with_metadata(action.desired, resourceVersion=NO_VERSION)
            written = await client.apply(kind, body, force=False)
        case Verb.APPLY:
            written = await client.apply(kind, _with_metadata(action.desired, uid=action.uid))
        case Verb.PATCH:
            patch = _with_metadata(action.patch or {}, uid=action.uid)
            written = await client.merge_patch(kind, namespace, name, patch)
        case Verb.REPLACE:
            await client.delete(kind, namespace, name, uid=uid)
            return replace(action, verb=Verb.CREATE, uid=None)
        case Verb.DELETE:
            try:
                foreground = action.foreground
                written = await client.delete(kind, namespace, name, uid=uid, foreground=foreground)
            except ConflictError:
                logger.debug("another object has that name now object=%s", action)
        case Verb.REFUSE:
            raise NameTakenError(f"{action} exists and does not belong to this PDCluster")
    if written is not None:
        on_response(kind, written)
    return None


def _with_metadata(body: Mapping[str, Any], **fields: object) -> dict[str, Any]:
    """With a uid it is for that very object, and for no other of its name."""
    return {**body, "metadata": {**body.get("metadata", {}), **fields}}
