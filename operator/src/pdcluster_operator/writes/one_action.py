"""Carry out one action. An object that is not as the cache had it is fetched and decided again, a
bounded number of times.
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

# A resourceVersion that no object has, since etcd's first write is its revision 2: an apply with it
# makes, or is a conflict
NO_VERSION = "1"

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
                message = f"the API server has no kind {action.kind} ({action.kind.api_version})"
                raise MissingKindError(message) from e
            if now.verb is Verb.CREATE:
                raise
        following = await _decided_again(client, now, on_response)
    if following is not None:
        raise ConflictError(f"{action} was changed by others again and again")
    return None


def _is_too_early(action: Action, following: Action) -> bool:
    return is_early(action) and following.verb not in (Verb.CREATE, Verb.REFUSE)


async def _decided_again(
    client: ApiClient, action: Action, on_response: OnResponse
) -> Action | None:
    live = await client.find(action.kind, action.namespace, action.name)
    if live is not None:
        on_response(action.kind, live)
    is_seed = action.kind.strategy is ApplyStrategy.REQUEST and action.verb is Verb.CREATE
    return decide(
        _without_request(action.desired) if is_seed and live else action.desired,
        live,
        rewrite=action.rewrite,
    )


async def _write(client: ApiClient, action: Action, on_response: OnResponse) -> Action | None:
    kind, namespace, name, uid = action.kind, action.namespace, action.name, str(action.uid)
    is_plain = kind.strategy in (ApplyStrategy.REQUEST, ApplyStrategy.RECORD)
    written: Mapping[str, Any] | None = None
    match action.verb:
        case Verb.CREATE if is_plain:
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


def _without_request(desired: Mapping[str, Any]) -> dict[str, Any]:
    """Our part of a scaler that exists, unexpectedly: its replicas are not to be overwritten."""
    metadata = {key: value for key, value in desired["metadata"].items() if key != "annotations"}
    return {**{key: value for key, value in desired.items() if key != "spec"}, "metadata": metadata}


def _with_metadata(body: Mapping[str, Any], **fields: object) -> dict[str, Any]:
    """With a uid it is for that very object, and for no other of its name."""
    return {**body, "metadata": {**body.get("metadata", {}), **fields}}
