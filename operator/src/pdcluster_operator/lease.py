"""Leader election by a Lease: at most one operator process works. A candidate takes a Lease that
has not changed for the lease time by its own monotonic clock; clocks of machines are never
compared.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Thread
from typing import Any, Self, TypeVar

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ClusterError, ConflictError
from pdcluster_api.apiserver.kinds import LEASE, Body
from pdcluster_schema.labels import FIELD_MANAGER

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseTimes:
    """Seconds.  lease: unchanged for so long = free; renew: the leader gives up; retry: between
    looks.

    Raises ValueError unless retry < renew < lease.
    """

    lease: float = 15.0
    renew: float = 10.0
    retry: float = 2.0

    def __post_init__(self) -> None:
        if not 0.0 < self.retry < self.renew < self.lease:
            raise ValueError(
                f"lease times must be 0 < retry < renew < lease, not {self.retry:g}, "
                f"{self.renew:g}, {self.lease:g}"
            )


@dataclass
class Leadership:
    client: ApiClient  # with time limits well below `times.renew`
    namespace: str
    name: str
    identity: str  # unique to the process, such as the pod's name and a random part
    times: LeaseTimes = LeaseTimes()
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _seen: tuple[str, str] = ("", "")
    _seen_at: float = 0.0
    _renewed_at: float = field(default=float("-inf"))

    @property
    def is_leader(self) -> bool:
        return self.clock() - self._renewed_at < self.times.renew

    async def acquire(self) -> None:
        """Wait until this process leads; errors of the API server are logged and retried."""
        while not await self._take_quietly():
            await self.sleep(self.times.retry)
        logger.info("leading lease=%s/%s identity=%s", self.namespace, self.name, self.identity)

    async def hold(self) -> None:
        """Renew the Lease; returns when the leadership is lost, and everything must stop."""
        while self.is_leader:
            await self.sleep(self.times.retry)
            left = self._renewed_at + self.times.renew - self.clock()
            try:
                async with asyncio.timeout(max(0.0, left)):
                    if not await self._take_quietly() and self._is_anothers():
                        break
            except TimeoutError:
                break
        self._renewed_at = float("-inf")
        logger.error(
            "lost the lease lease=%s/%s identity=%s", self.namespace, self.name, self.identity
        )

    async def release(self) -> None:
        """Give the Lease up; an error is only logged: the Lease then expires by itself."""
        self._renewed_at = float("-inf")
        try:
            live = await self.client.find(LEASE, self.namespace, self.name)
            if live is not None and _holder(live) == self.identity:
                await self.client.replace(LEASE, self._record(live, holder=""))
        except ClusterError as e:
            logger.warning("lease not released lease=%s/%s error=%s", self.namespace, self.name, e)

    async def _take_quietly(self) -> bool:
        try:
            return await self._take()
        except ConflictError:
            return False  # another candidate was faster
        except ClusterError as e:
            logger.warning("lease not reached lease=%s/%s error=%s", self.namespace, self.name, e)
            return False

    async def _take(self) -> bool:
        sent_at = self.clock()  # time spent on the way counts against us
        live = await self.client.find(LEASE, self.namespace, self.name)
        if live is None:
            answer = await self.client.create(LEASE, self._record(None, holder=self.identity))
        elif self._may_take(live):
            answer = await self.client.replace(LEASE, self._record(live, holder=self.identity))
        else:
            return False
        self._observe(answer)
        self._renewed_at = sent_at
        return True

    def _may_take(self, live: Body) -> bool:
        self._observe(live)
        is_free = _holder(live) in ("", self.identity)
        return is_free or self.clock() - self._seen_at >= self._lease_seconds(live)

    def _observe(self, live: Body) -> None:
        observed = (live["metadata"]["resourceVersion"], _holder(live))
        if observed != self._seen:
            self._seen, self._seen_at = observed, self.clock()

    def _lease_seconds(self, live: Body) -> float:
        """Lease time of the current holder; a candidate with other settings must keep to it."""
        seconds = (live.get("spec") or {}).get("leaseDurationSeconds")
        return max(self.times.lease, float(seconds or 0))

    def _is_anothers(self) -> bool:
        return self._seen[1] not in ("", self.identity)

    def _record(self, live: Mapping[str, Any] | None, *, holder: str) -> Body:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = (live or {}).get("spec") or {}
        is_new = before.get("holderIdentity") != holder
        metadata: Mapping[str, Any] = (live or {}).get("metadata") or {
            "name": self.name,
            "namespace": self.namespace,
            "labels": {"app.kubernetes.io/managed-by": FIELD_MANAGER},
        }
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.name,
            "metadata": {key: value for key, value in metadata.items() if key != "managedFields"},
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": max(1, round(self.times.lease)),
                "acquireTime": now if is_new else before.get("acquireTime", now),
                "renewTime": now,
                "leaseTransitions": int(before.get("leaseTransitions") or 0) + is_new,
            },
        }


def _holder(live: Mapping[str, Any]) -> str:
    return str((live.get("spec") or {}).get("holderIdentity") or "")


Result = TypeVar("Result")


def _end_process() -> None:
    logger.error("ended at once: the work did not end in time after the lease was lost")
    os._exit(1)


@dataclass
class LeaseThread:
    """One candidate, as `Leadership`; runs while it is entered."""

    # makes the client of the API server, on the loop of the thread
    connect: Callable[[], Coroutine[Any, Any, ApiClient]]
    namespace: str
    name: str
    identity: str
    times: LeaseTimes = field(default_factory=LeaseTimes)
    end: Callable[[], None] = _end_process  # ends the process without asking its main loop
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop, repr=False)
    _thread: Thread = field(init=False, repr=False)
    _client: ApiClient = field(init=False, repr=False)
    _leadership: Leadership = field(init=False, repr=False)
    _holding: "asyncio.Task[Any] | None" = field(default=None, init=False, repr=False)

    async def __aenter__(self) -> Self:
        self._thread = Thread(target=self._loop.run_forever, name="lease", daemon=True)
        self._thread.start()
        try:
            self._client = await self._run(self.connect())
        except BaseException:
            await self._stop()
            raise
        names = self.namespace, self.name, self.identity
        self._leadership = Leadership(self._client, *names, self.times)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._run(self._client.close())
        await self._stop()

    async def acquire(self) -> None:
        await self._run(self._leadership.acquire())

    async def hold(self) -> None:
        await self._run(self._hold())

    async def release(self) -> None:
        await self._run(self._release())

    async def _release(self) -> None:
        if self._holding is not None:  # else it would take what is given up
            self._holding.cancel()
            await asyncio.wait({self._holding})
        await self._leadership.release()

    async def _hold(self) -> None:
        self._holding = asyncio.current_task()
        await self._leadership.hold()
        self._loop.call_later(self.times.lease - self.times.renew, self.end)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Awaitable[Result]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()
