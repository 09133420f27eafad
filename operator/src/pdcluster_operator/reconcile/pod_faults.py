"""Why a StatefulSet gets no pods: its controller says so in events alone, which are read only when it has been short for a while."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdcluster_operator.api import conditions
from pdcluster_operator.cluster.cache import Body, Key
from pdcluster_operator.cluster.client import ApiClient
from pdcluster_operator.cluster.kinds import CORE_EVENT
from pdcluster_operator.cluster.observe import Live, is_short_of_pods

SHORT_SECONDS = 3.0
"""A StatefulSet that scales up is short of pods for less."""

LOOK_AGAIN_SECONDS = 15.0
Fault = tuple[str, str]
_POD = re.compile(r'pods "[^"]*" is ')
_PREFIX = re.compile(r"^.*? failed error: ", re.DOTALL)


@dataclass
class PodFaults:
    """Remembers since when each StatefulSet has been short of pods."""

    client: ApiClient
    clock: Callable[[], float] = time.monotonic
    _short_since: dict[Key, dict[str, float]] = field(default_factory=dict)

    async def of(self, live: Live) -> tuple[dict[str, Fault], float | None]:
        """Faults by the name of the StatefulSet, and the seconds after which to look again (None = no need)."""
        now = self.clock()
        before = self._short_since.get(live.key, {})
        short = {name: before.get(name, now) for name, body in live.own("StatefulSet").items() if is_short_of_pods(body)}
        if not short:
            self.forget(live.key)
            return {}, None
        self._short_since[live.key] = short
        overdue = [name for name, since in short.items() if now - since >= SHORT_SECONDS]
        faults = {name: fault for name in overdue if (fault := await self._read(live.key.namespace, name))}
        return faults, LOOK_AGAIN_SECONDS if len(overdue) == len(short) else SHORT_SECONDS

    def forget(self, key: Key) -> None:
        """Nothing is short, or the PDCluster is gone."""
        self._short_since.pop(key, None)

    async def _read(self, namespace: str, name: str) -> Fault | None:
        fields = f"involvedObject.kind=StatefulSet,involvedObject.name={name},reason=FailedCreate"
        events = [event async for event in self.client.list(CORE_EVENT, namespace, fields=fields)]
        return fault_of(max(events, key=_seen)["message"]) if events else None


def fault_of(message: str) -> Fault:
    """(reason, message) from an event's words, without the name of the pod that happened to be tried."""
    short = _POD.sub("a pod is ", _PREFIX.sub("", message))
    reason = conditions.QUOTA_EXCEEDED if "exceeded quota" in message else conditions.PODS_REFUSED
    return reason, short


def _seen(event: Body) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])
