"""Write the status of a PDCluster and those of its scalers, each only where it differs."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import (
    ClusterError,
    ConflictError,
    NotFoundError,
    UnavailableError,
    failure_of,
)
from pdcluster_api.apiserver.kinds import POOL_SCALER, Body, Kind
from pdcluster_api.apiserver.observe import Live
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_api.plan.result import ClusterPlan
from pdcluster_operator.informer.cache import Cache, name_of
from pdcluster_operator.reconcile.session import Session

logger = logging.getLogger(__name__)
_OF_A_WRITE = frozenset({"resourceVersion", "managedFields"})  # Metadata that every write changes


@dataclass(frozen=True)
class Statuses:
    client: ApiClient
    cache: Cache

    async def write(
        self, session: Session, kind: Kind, body: Mapping[str, Any], status: Mapping[str, Any]
    ) -> bool:
        """Write a status that differs; returns whether it did.  Raises ConflictError."""
        if status == (body.get("status") or {}):
            return False
        metadata = body["metadata"]
        written = await write_status(self.client, kind, body, status)
        if written is not None:
            is_new = self.cache.put(kind.name, written) is not None
            # the answer came before the event
            if is_new and written["metadata"].get("generation") != metadata.get("generation"):
                session.needs_requeue = True
            return True
        session.needs_requeue = True
        found = await self.client.find(kind, metadata["namespace"], metadata["name"])
        if found is None:  # the watch has not delivered that yet
            self.cache.forget(name_of(kind.name, body))
            return True
        self.cache.put(kind.name, found)
        raise ConflictError(f"{kind} {metadata['name']} is another one now, or is being changed")

    async def write_scalers(
        self, live: Live, session: Session, plan: ClusterPlan
    ) -> tuple[bool, list[WriteFailure], ConflictError | None]:
        """The status of the scalers that exist; one that was just made follows.  Returns whether
        one was written, or tried to be, what was refused, and a conflict of one that changed.
        """
        wrote, refused, conflict = False, list[WriteFailure](), None
        bodies = {
            (body["spec"]["role"], body["spec"]["pool"]): body
            for body in live.own(POOL_SCALER.name).values()
        }
        for scaler in plan.scalers:
            body = bodies.get((scaler.role, scaler.pool))
            if body is None:
                continue
            try:
                wrote |= await self.write(session, POOL_SCALER, body, scaler.status)
            except UnavailableError:
                raise
            except ConflictError as e:
                wrote, conflict = True, e
            except ClusterError as e:
                name = body["metadata"]["name"]
                refused.append(failure_of(e, f"status of PDPoolScaler {name}"))
                where = live.key.namespace
                logger.warning("refused status object=%s namespace=%s error=%s", name, where, e)
        return wrote, refused, conflict

    def after(self, live: Live) -> Live | None:
        """The same with the scalers' new statuses; None = a scaler has changed otherwise."""
        children = list(live.children)
        for position, body in enumerate(children):
            if body["kind"] != POOL_SCALER.name:
                continue
            metadata = body["metadata"]
            now = self.cache.get(POOL_SCALER.name, metadata["namespace"], metadata["name"])
            if now is None or _without_status(now) != _without_status(body):
                return None
            children[position] = now
        return Live(live.body, children)


def _without_status(body: Body) -> Body:
    metadata = {key: value for key, value in body["metadata"].items() if key not in _OF_A_WRITE}
    return {**{key: value for key, value in body.items() if key != "status"}, "metadata": metadata}


async def write_status(
    client: ApiClient, kind: Kind, live: Mapping[str, Any], status: Mapping[str, Any]
) -> Body | None:
    """Make the status of a live body equal to the given one.  Returns the object as the API server
    has it now; None when it is gone, or is another one now.
    """
    metadata = live["metadata"]
    operations = [
        {"op": "test", "path": "/metadata/uid", "value": metadata["uid"]},
        {"op": "add", "path": "/status", "value": status},  # replaces what is there
    ]
    try:
        return await client.patch_status(kind, metadata["namespace"], metadata["name"], operations)
    except (NotFoundError, ConflictError):
        return None
