"""Find why a StatefulSet gets no pods, from the events of its controller. They are listed for a
whole namespace, once it has been short of pods for a while: such a list is dear for the API server.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from math import inf

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
            when, read = self._read.get(namespace, (-inf, {}))
            if self.clock() - when >= EVENTS_KEPT_SECONDS:
                read = await self._list(namespace)
                self._read = {
                    space: kept
                    for space, kept in self._read.items()
                    if self.clock() - kept[0] < EVENTS_KEPT_SECONDS
                }
                self._read[namespace] = self.clock(), read
        return read

    async def _list(self, namespace: str) -> _Read:
        newest: dict[str, tuple[str, str]] = {}
        try:
            async for event in self.client.list(CORE_EVENT, namespace, fields=_FIELDS):
                uid = event["involvedObject"].get("uid", "")
                newest[uid] = max(
                    newest.get(uid, _NEVER), (_time_of(event), event.get("message") or "")
                )
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
    clock: Callable[[], float] = time.monotonic  # monotonic seconds
    # wall-clock time, which is what events have
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _short_since: dict[str, float] = field(default_factory=dict)
    # by name, of all StatefulSets that there are
    _uids: dict[str, str] = field(default_factory=dict)
    # uids of StatefulSets whose last shortage, if any, was observed from its start
    _seen: set[str] = field(default_factory=set)

    async def of(self, live: Live) -> tuple[dict[str, Problem], float | None]:
        """Problems by name of the StatefulSet, and seconds until the next read (None = no need)."""
        self._observe(live.own("StatefulSet"), self.clock())
        return await self.again(live.key.namespace)

    async def again(self, namespace: str) -> tuple[dict[str, Problem], float | None]:
        """The same of the StatefulSets that were seen last."""
        now = self.clock()
        if not self._short_since:
            return {}, None
        overdue = [
            name
            for name, since in self._short_since.items()
            if now - since >= SHORTAGE_GRACE_SECONDS
        ]
        requeue_after = self._requeue_after(
            now, is_all_overdue=len(overdue) == len(self._short_since)
        )
        if not overdue:
            return {}, requeue_after
        read = await self.events.of(namespace)
        if isinstance(read, ClusterError):
            return dict.fromkeys(overdue, _unknown(read)), requeue_after
        found = {name: read.get(self._uids[name], _NEVER) for name in overdue}
        faults = {
            name: refusal_of(message)
            for name, (when, message) in found.items()
            if message
            and (self._uids[name] not in self._seen or when >= self._stamp(self._short_since[name]))
        }
        return faults, requeue_after

    def _observe(self, sets: Mapping[str, Body], now: float) -> None:
        self._short_since = {
            name: self._short_since.get(name, now)
            for name, body in sets.items()
            if is_short_of_pods(body)
        }
        seen = self._seen | {
            _uid(body) for name, body in sets.items() if name not in self._short_since
        }
        self._uids = {name: _uid(body) for name, body in sets.items()}
        self._seen = seen & set(self._uids.values())

    def _requeue_after(self, now: float, *, is_all_overdue: bool) -> float:
        if not is_all_overdue:
            return SHORTAGE_GRACE_SECONDS
        return min(
            MAX_EVENTS_POLL_SECONDS, max(EVENTS_POLL_SECONDS, now - max(self._short_since.values()))
        )

    def _stamp(self, since: float) -> str:
        """The time on our monotonic clock as events write it, earlier by what clocks may differ."""
        return (self.now() - timedelta(seconds=self.clock() - since + SKEW_SECONDS)).strftime(
            "%Y-%m-%dT%H:%M:%S"
        )


def _unknown(error: ClusterError) -> Problem:
    message = f"pods are missing, and the events that say why cannot be read: {error}"
    return Problem(conditions.PODS_REFUSED, f"{message}; {error.fix}" if error.fix else message)


def _uid(body: Body) -> str:
    return str(body["metadata"]["uid"])


def _time_of(event: Body) -> str:
    return str(
        event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"]["creationTimestamp"]
    )
