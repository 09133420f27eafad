"""Find why a StatefulSet gets no pods, from the events of its controller. They are listed for a
whole namespace, once it has been short of pods for a while: such a list is dear for the API server.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.container_ends import refusal_of
from pdcluster_api.apiserver.errors import ClusterError, UnavailableError
from pdcluster_api.apiserver.kinds import CORE_EVENT, Body
from pdcluster_api.apiserver.observe import Live, is_short_of_pods
from pdcluster_api.plan.observed.state import Problem
from pdcluster_schema import conditions

logger = logging.getLogger(__name__)
SHORTAGE_GRACE_SECONDS = 3.0  # A StatefulSet that scales up is short of pods for less

EVENTS_POLL_SECONDS = 15.0
# Longest period: a long shortage is looked at less and less often; its pods, when they come, are
# events of their own
MAX_EVENTS_POLL_SECONDS = 120.0

EVENTS_KEPT_SECONDS = 3.0
# Lag of the control plane's clocks behind ours, and of our look behind the shortage
SKEW_SECONDS = 30.0

_FIELDS = "involvedObject.kind=StatefulSet,reason=FailedCreate"
_NEVER = ("", "")
_Read = Mapping[str, tuple[str, str]] | ClusterError


@dataclass
class FailedCreates:
    """The newest FailedCreate event of each StatefulSet, by namespace; all PDClusters share it."""

    client: ApiClient
    clock: Callable[[], float] = time.monotonic
    _read: dict[str, tuple[float, _Read]] = field(default_factory=dict)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def of(self, namespace: str) -> _Read:
        """(time, message) by uid of the StatefulSet; an error when it is refused."""
        async with self._reading:
            oldest = self.clock() - EVENTS_KEPT_SECONDS
            self._read = {space: kept for space, kept in self._read.items() if kept[0] > oldest}
            if namespace not in self._read:
                read = await self._list(namespace)
                self._read[namespace] = self.clock(), read
            return self._read[namespace][1]

    async def _list(self, namespace: str) -> _Read:
        newest: dict[str, tuple[str, str]] = {}
        try:
            async for event in self.client.list(CORE_EVENT, namespace, fields=_FIELDS):
                uid = event["involvedObject"].get("uid", "")
                found = _time_of(event), event.get("message") or ""
                newest[uid] = max(newest.get(uid, _NEVER), found)
        except UnavailableError:
            raise
        except ClusterError as e:
            logger.warning("events not read namespace=%s error=%s", namespace, e)
            return e
        return newest


@dataclass
class PodFaults:
    """Start of the shortage of pods of each StatefulSet of one PDCluster."""

    events: FailedCreates
    clock: Callable[[], float] = time.monotonic
    # wall-clock time, which is what events have
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _short_since: dict[str, float] = field(default_factory=dict)
    _uids: dict[str, str] = field(default_factory=dict)  # by name, of all StatefulSets
    # uids of StatefulSets whose last shortage, if any, was observed from its start
    _seen: set[str] = field(default_factory=set)

    async def of(self, live: Live) -> tuple[dict[str, Problem], float | None]:
        """Problems by name of the StatefulSet, and seconds until the next read (None = no need)."""
        sets, now = live.own("StatefulSet"), self.clock()
        short = [name for name, body in sets.items() if is_short_of_pods(body)]
        self._short_since = {name: self._short_since.get(name, now) for name in short}
        self._uids = {name: str(body["metadata"]["uid"]) for name, body in sets.items()}
        whole = {uid for name, uid in self._uids.items() if name not in self._short_since}
        self._seen = (self._seen | whole) & set(self._uids.values())
        return await self.again(live.key.namespace)

    async def again(self, namespace: str) -> tuple[dict[str, Problem], float | None]:
        """The same of the StatefulSets that were seen last."""
        now, since = self.clock(), self._short_since
        overdue = [name for name in since if now - since[name] >= SHORTAGE_GRACE_SECONDS]
        if not overdue:
            return {}, SHORTAGE_GRACE_SECONDS if since else None
        requeue_after = SHORTAGE_GRACE_SECONDS
        if len(overdue) == len(since):
            lasted = now - max(since.values())
            requeue_after = min(MAX_EVENTS_POLL_SECONDS, max(EVENTS_POLL_SECONDS, lasted))
        read = await self.events.of(namespace)
        if isinstance(read, ClusterError):
            return dict.fromkeys(overdue, _unknown(read)), requeue_after
        faults: dict[str, Problem] = {}
        for name in overdue:
            uid = self._uids[name]
            when, message = read.get(uid, _NEVER)
            if message and (uid not in self._seen or when >= self._stamp(since[name])):
                faults[name] = refusal_of(message)
        return faults, requeue_after

    def _stamp(self, since: float) -> str:
        """The time on our monotonic clock as events write it, earlier by what clocks may differ."""
        age = timedelta(seconds=self.clock() - since + SKEW_SECONDS)
        return (self.now() - age).strftime("%Y-%m-%dT%H:%M:%S")


def _unknown(error: ClusterError) -> Problem:
    message = f"pods are missing, and the events that say why cannot be read: {error}"
    return Problem(conditions.PODS_REFUSED, f"{message}; {error.fix}" if error.fix else message)


def _time_of(event: Body) -> str:
    time = event.get("lastTimestamp") or event.get("eventTime")
    return str(time or event["metadata"]["creationTimestamp"])
