"""State that the connections of a relaying router share: workers, policy, limits and counts."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.errors import RequestError
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.proxy.picker import Picker, UpstreamState
from pdcluster_worker.proxy.request_head import RequestHead
from pdcluster_worker.proxy.upstream import IDLE_SECONDS, Upstream, UpstreamPool
from pdcluster_worker.server.http.api_keys import TenantOfKey, key_in
from pdcluster_worker.server.http.connection import HttpConnection
from pdcluster_worker.server.http.limits import limits_of
from pdcluster_worker.system.process import FILES_OF_RELAYED, fitting

POLL_SECONDS = 0.5


class ProxiedConnection(Protocol):
    """Implemented by `proxy.client_connection.ClientConnection`."""

    deadline: float
    transport: asyncio.Transport

    @property
    def is_waiting(self) -> bool: ...

    def expire(self, now: float) -> None: ...

    def break_off(self, error: RequestError) -> bool: ...


class _Once(HttpConnection):
    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.cycle.keep_alive = False


class ReverseProxy:
    """One per router.  workers: decode and mixed workers now."""

    def __init__(
        self,
        policy: Callable[[], PolicyConfig],
        tenant_of: TenantOfKey,
        is_draining: Callable[[], bool],
        metrics: Metrics,
    ) -> None:
        self.workers: Callable[[], Sequence[UpstreamState]] = lambda: ()
        self.picker: Picker[UpstreamPool] = Picker()
        self.policy = policy
        self.is_draining = is_draining
        self.now = asyncio.get_running_loop().time
        self._tenant_of = tenant_of
        self._pools: dict[str, UpstreamPool] = {}
        self.fronts: set[ProxiedConnection] = set()
        self.num_held_bytes = self.num_requests = 0
        self._ordinary: type[HttpConnection] = HttpConnection
        self._once: Any = HttpConnection
        self._metrics = metrics
        self._counts = {
            outcome: metrics.relayed_requests.labels(outcome)
            for outcome in ("answered", "cut", "client_gone", "not_taken")
        }
        metrics.relaying_requests.set_function(lambda: self.num_open)
        self.take_policy()

    def take_policy(self) -> None:
        limits = limits_of(self.policy().http_limits)
        self.is_on = self.policy().relaying.enabled
        self.max_header_bytes = limits.max_header_bytes
        self._max_fields = limits.max_headers
        self.keep_alive_seconds = limits.keep_alive_seconds
        self._idle_seconds = min(IDLE_SECONDS, limits.keep_alive_seconds / 2)
        self.max_requests = fitting(limits.max_connections, files_each=FILES_OF_RELAYED)
        self.max_connections = self.max_requests + limits.spare_connections
        self.max_held_bytes = limits.max_bodies_bytes
        self._max_body_bytes = self.policy().admission.max_body_bytes

    @property
    def pools(self) -> Collection[UpstreamPool]:
        return self._pools.values()

    @property
    def num_open(self) -> int:
        return sum(pool.in_flight for pool in self._pools.values())

    def hand_over_to(self, ordinary: type[HttpConnection]) -> None:
        self._ordinary = ordinary
        self._once = type("Once", (_Once, ordinary), {})

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self.take_policy()
            self.poll()
            now = self.now()
            for front in [front for front in self.fronts if front.deadline <= now]:
                front.expire(now)
            for pool in self._pools.values():
                pool.close_idle(now - self._idle_seconds)

    def poll(self) -> None:
        """Requests at a worker that is gone go on elsewhere, or end; without gRPC it keeps begun
        answers.
        """
        found = {worker.key: worker for worker in self.workers()}
        gone = [self._pools.pop(key) for key in [*self._pools] if key not in found]
        left = []
        for key, worker in found.items():
            pool = self._pools.get(key)
            if pool is None:
                pool = self._pools[key] = UpstreamPool(worker.pod, key, worker.address)
            if pool.is_connected and not worker.is_connected:
                left.append(pool)
            pool.is_connected, pool.has_drained = worker.is_connected, worker.has_drained
        self.picker.follow(self._pools, found)
        for pool in left:
            pool.leave(moves=bool(self.picker.members))
        for pool in gone:
            pool.abort()

    def end_answers(self, error: RequestError) -> int:
        """End all that is relayed by this error; returns how many those are."""
        return sum(front.break_off(error) for front in [*self.fronts])

    def close(self) -> None:
        self.picker.set([])
        for pool in self._pools.values():
            pool.abort()

    # --- what connections ask -----------------------------------------------------------------

    def enter(self, front: ProxiedConnection) -> None:
        """A connection; the one that has waited longest makes room for it."""
        if len(self.fronts) >= self.max_connections:
            waiting = (other for other in self.fronts if other.is_waiting)
            longest = min(waiting, key=lambda other: other.deadline, default=front)
            self.leave(longest)  # now, so that the next one takes another's place
            longest.transport.abort()
            if longest is front:
                return
        self.fronts.add(front)

    def leave(self, front: ProxiedConnection) -> None:
        self.fronts.discard(front)

    def reason_against(self, request: RequestHead, head: bytes) -> str | None:
        """Reason why the router serves this request itself; None = it is relayed."""
        if not self.picker.members:
            return "worker"
        if self.num_requests >= self.max_requests:
            return "crowd"
        has_key = None if self._tenant_of is None else self._has_key
        if (reason := request.read(head, self._max_fields, has_key)) is not None:
            return str(reason)
        if len(head) > self.max_header_bytes or request.length > self._max_body_bytes:
            return "size"
        is_full = self.num_held_bytes + request.length > self.max_held_bytes
        return "size" if is_full else None

    def hand_over(
        self, transport: asyncio.Transport, made: dict[str, Any], came: bytes, *, returns: bool
    ) -> None:
        """returns: the client's next request is to come by a new connection."""
        ordinary = (self._once if returns else self._ordinary)(**made)
        if not transport.is_reading():
            transport.resume_reading()
        transport.set_protocol(ordinary)
        ordinary.connection_made(transport)
        if not transport.is_closing():
            ordinary.data_received(came)

    def _has_key(self, authorization: bytes, api_key: bytes) -> bool:
        key = key_in(authorization.decode("latin-1"), api_key.decode("latin-1"))
        return bool(key and self._tenant_of and self._tenant_of(key) is not None)

    # --- what requests ask --------------------------------------------------------------------

    def idle_upstream(self, pool: UpstreamPool) -> Upstream | None:
        """An idle connection to a worker that it will not have closed; None = make one."""
        pool.close_idle(self.now() - self._idle_seconds)
        return pool.idle.pop() if pool.idle else None

    def close_idle_one(self) -> None:
        """As many connections to workers as requests may be open: the longest idle ones end."""
        kept = [pool for pool in self._pools.values() if pool.idle]
        num_idle = sum(len(pool.idle) for pool in kept)
        too_many = self.num_open + num_idle - self.max_requests
        for _ in range(min(too_many, num_idle)):
            longest = min(kept, key=lambda pool: pool.idle[0].idle_since)
            longest.idle.pop(0).close()
            if not longest.idle:
                kept.remove(longest)

    # --- counts -------------------------------------------------------------------------------

    def count(self, outcome: str) -> None:
        self._counts[outcome].inc()

    def count_own(self, reason: str) -> None:
        if self.is_on:
            self._metrics.unrelayed_requests.labels(reason).inc()

    def retried(self, reason: str) -> None:
        self._metrics.relay_retries.labels(reason).inc()
