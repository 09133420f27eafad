"""Events on a PDCluster, the same reason and message once within a period. One that cannot be
posted is logged and lost.
"""

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ClusterError, ConflictError
from pdcluster_api.apiserver.kinds import EVENT
from pdcluster_api.plan.result import PlannedEvent
from pdcluster_schema.labels import FIELD_MANAGER
from pdcluster_schema.text import shortened_bytes

logger = logging.getLogger(__name__)

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
