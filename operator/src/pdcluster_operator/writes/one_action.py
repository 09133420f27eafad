"""Carry out one action against the API server, whatever the object turns out to be by then.

The action was decided on what the cache had.  An object that is not so (changed, made or deleted in
between) is fetched and decided again, a bounded number of times.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import (
    ConflictError,
    MissingKindError,
    NameTakenError,
    NotFoundError,
)
from pdcluster_api.apiserver.kinds import ApplyStrategy, Kind
from pdcluster_operator.writes.actions import Action, Verb, is_early
from pdcluster_operator.writes.diff import decide

logger = logging.getLogger(__name__)

MAX_DECISIONS = 5  # an object that changes faster than that is left for the next reconcile

NO_VERSION = "1"
"""A resourceVersion that no object has, since etcd's first write is its revision 2: an apply with
it makes, or is a conflict.
"""

OnResponse = Callable[[Kind, Mapping[str, Any]], None]


async def carry_out(client: ApiClient, action: Action, on_response: OnResponse) -> Action | None:
    """One action, decided again as often as the object turns out to be another than was thought.

    Returns what is left for a later stage: a Service that was to be made, and is there, changes
    after the StatefulSets.
    """
    following: Action | None = action
    for _ in range(MAX_DECISIONS):
        if following is None or _is_too_early(action, following):
            return following
        logger.info(
            "%s object=%s namespace=%s", following.verb.value, following, following.namespace
        )
        following = await _with_retry(client, following, on_response)
    if following is not None:
        raise ConflictError(f"{action} was changed by others again and again")
    return None


def _is_too_early(action: Action, following: Action) -> bool:
    """Return whether an action of the first stage became one that changes what is there."""
    return is_early(action) and following.verb not in (Verb.CREATE, Verb.REFUSE)


async def _with_retry(client: ApiClient, action: Action, on_response: OnResponse) -> Action | None:
    """Carry out an action; returns what is still to be done, as when the object is another by
    now.
    """
    try:
        return await _once(client, action, on_response)
    except ConflictError as e:
        logger.info("decided again object=%s namespace=%s because=%s", action, action.namespace, e)
    except NotFoundError as e:
        if action.verb is Verb.CREATE and action.kind.is_optional:
            message = f"the API server has no kind {action.kind} ({action.kind.api_version})"
            raise MissingKindError(message) from e
        if action.verb is Verb.CREATE:
            raise
    live = await client.find(action.kind, action.namespace, action.name)
    if live is not None:
        on_response(action.kind, live)
    is_seed = action.kind.strategy is ApplyStrategy.REQUEST and action.verb is Verb.CREATE
    return decide(
        _without_request(action.desired) if is_seed and live else action.desired,
        live,
        rewrite=action.rewrite,
    )


async def _once(client: ApiClient, action: Action, on_response: OnResponse) -> Action | None:
    """Returns what is still to be done."""
    match action.verb:
        case Verb.CREATE:
            return await _create(client, action, on_response)
        case Verb.APPLY:
            on_response(action.kind, await client.apply(action.kind, _with_uid(action)))
        case Verb.PATCH:
            patch = {
                **(action.patch or {}),
                "metadata": {**(action.patch or {}).get("metadata", {}), "uid": action.uid},
            }
            on_response(
                action.kind,
                await client.merge_patch(action.kind, action.namespace, action.name, patch),
            )
        case Verb.REPLACE:
            await client.delete(action.kind, action.namespace, action.name, uid=str(action.uid))
            return replace(action, verb=Verb.CREATE, uid=None)
        case Verb.DELETE:
            await _delete(client, action, on_response)
        case Verb.REFUSE:
            raise NameTakenError(f"{action} exists and does not belong to this PDCluster")
    return None


async def _create(client: ApiClient, action: Action, on_response: OnResponse) -> Action | None:
    if action.kind.strategy in (ApplyStrategy.REQUEST, ApplyStrategy.RECORD):
        on_response(action.kind, await client.create(action.kind, action.desired))
        return None
    # Drift is found by the managed fields of an apply.  It alone would quietly add to a foreign
    # object, and none of them is among the children that were observed.
    metadata = {**action.desired["metadata"], "resourceVersion": NO_VERSION}
    on_response(
        action.kind,
        await client.apply(action.kind, {**action.desired, "metadata": metadata}, force=False),
    )
    return None


async def _delete(client: ApiClient, action: Action, on_response: OnResponse) -> None:
    try:
        left = await client.delete(
            action.kind,
            action.namespace,
            action.name,
            uid=str(action.uid),
            foreground=action.foreground,
        )
    except ConflictError:
        logger.debug("another object has that name now object=%s", action)
        return
    if left is not None:
        on_response(action.kind, left)


def _without_request(desired: Mapping[str, Any]) -> dict[str, Any]:
    """Our part of a scaler that exists, unexpectedly: its replicas are not to be overwritten."""
    metadata = {key: value for key, value in desired["metadata"].items() if key != "annotations"}
    return {**{key: value for key, value in desired.items() if key != "spec"}, "metadata": metadata}


def _with_uid(action: Action) -> dict[str, Any]:
    """The manifest for that very object and for no other of its name."""
    return {**action.desired, "metadata": {**action.desired["metadata"], "uid": action.uid}}
