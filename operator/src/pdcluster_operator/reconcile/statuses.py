"""Write the status of a PDCluster and those of its scalers, each only where it differs, and the
conditions where workers read them; and Events, the same reason and message once within a period.
"""

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import (
    ClusterError,
    ConflictError,
    NotFoundError,
    UnavailableError,
    failure_of,
)
from pdcluster_api.apiserver.kinds import CONFIG_MAP, EVENT, POOL_SCALER, Body, Kind
from pdcluster_api.apiserver.observe import Live
from pdcluster_api.manifests.objects import child_names
from pdcluster_api.manifests.worker_config import conditions_file
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_api.plan.result import ClusterPlan, PlannedEvent
from pdcluster_operator.informer.cache import Cache, name_of
from pdcluster_operator.reconcile.session import Session
from pdcluster_schema.conditions import CONDITIONS_FILE
from pdcluster_schema.labels import FIELD_MANAGER
from pdcluster_schema.quick_json import decoded
from pdcluster_schema.text import shortened_bytes

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

    async def write_conditions(
        self, live: Live, conditions: Iterable[Mapping[str, Any]], now: str
    ) -> bool:
        """Write the conditions of a status beside the policy file, by another operation than an
        apply, which would take them away again.  One that is refused is logged: they are a copy.
        """
        body = live.own(CONFIG_MAP.name).get(child_names(live.key.name).policy)
        text = conditions_file(conditions, now)
        if body is None or _items(text) == _items((body.get("data") or {}).get(CONDITIONS_FILE)):
            return False
        metadata = body["metadata"]
        patch = {"metadata": {"uid": metadata["uid"]}, "data": {CONDITIONS_FILE: text}}
        try:
            where, name = metadata["namespace"], metadata["name"]
            written = await self.client.merge_patch(CONFIG_MAP, where, name, patch)
        except UnavailableError:
            raise
        except NotFoundError:  # its event follows
            return False
        except ClusterError as e:
            logger.warning("conditions not copied key=%s error=%s", live.key, e)
            return False
        self.cache.put(CONFIG_MAP.name, written)
        return True

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
        """The same with the scalers' new statuses and the new copy of the conditions; None = one of
        these children has changed otherwise.
        """
        children = list(live.children)
        policy = child_names(live.key.name).policy
        for position, body in enumerate(children):
            metadata, kind = body["metadata"], body["kind"]
            if kind != POOL_SCALER.name and (kind, metadata["name"]) != (CONFIG_MAP.name, policy):
                continue
            now = self.cache.get(kind, metadata["namespace"], metadata["name"])
            if now is None or _of_others(now) != _of_others(body):
                return None
            children[position] = now
        return Live(live.body, children)


def _items(text: str | None) -> Any:
    """The conditions of a file, whenever it was written; None = it cannot be read."""
    try:
        return None if text is None else decoded(text.encode())["items"]
    except (LookupError, TypeError, ValueError):
        return None


def _of_others(body: Body) -> Body:
    """An object without the parts that are written here."""
    metadata = {key: value for key, value in body["metadata"].items() if key not in _OF_A_WRITE}
    data = {key: value for key, value in (body.get("data") or {}).items() if key != CONDITIONS_FILE}
    rest = {key: value for key, value in body.items() if key != "status"}
    return {**rest, "metadata": metadata, "data": data}


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


PERIOD_SECONDS = 600.0
MAX_REMEMBERED = 4096
MAX_NOTE_BYTES = 1024  # the API server refuses a longer one

_Posted = tuple[str, str, str]


@dataclass
class EventRecorder:
    client: ApiClient
    instance: str  # the operator process, usually its pod's name
    clock: Callable[[], float] = time.monotonic  # monotonic seconds
    now: Callable[[], datetime] = lambda: datetime.now(UTC)  # wall-clock time, for the event itself
    _posted: "OrderedDict[_Posted, float]" = field(default_factory=OrderedDict)

    async def post(self, about: Mapping[str, Any], event: PlannedEvent) -> bool:
        """Post an event about an object; returns whether it was posted now."""
        key = (about["metadata"]["uid"], event.reason, event.message)
        if self._is_known(key):
            return False
        try:
            await self.client.create(EVENT, event_object(about, event, self.instance, self.now()))
        except ConflictError:
            logger.debug("a lost answer had posted the event reason=%s", event.reason)
        except ClusterError as e:
            logger.warning(
                "no event posted reason=%s object=%s error=%s",
                event.reason,
                about["metadata"]["name"],
                e,
            )
            return False
        self._remember(key)
        return True

    def _is_known(self, key: _Posted) -> bool:
        posted = self._posted.get(key)
        return posted is not None and self.clock() - posted < PERIOD_SECONDS

    def _remember(self, key: _Posted) -> None:
        self._posted[key] = self.clock()
        self._posted.move_to_end(key)
        if len(self._posted) > MAX_REMEMBERED:
            self._posted.popitem(last=False)


def event_object(
    about: Mapping[str, Any], event: PlannedEvent, instance: str, now: datetime
) -> dict[str, Any]:
    """The Event; its name comes from content and time, so that a retry makes no second."""
    metadata = about["metadata"]
    stamp = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    identity = f"{metadata['uid']} {event.reason} {event.message} {stamp}"
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {
            "name": f"{metadata['name']}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}",
            "namespace": metadata["namespace"],
        },
        "eventTime": stamp,
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "action": "Reconcile",
        "note": shortened_bytes(event.message, MAX_NOTE_BYTES),
        "regarding": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "reportingController": FIELD_MANAGER,
        "reportingInstance": instance,
    }
