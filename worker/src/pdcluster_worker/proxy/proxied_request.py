"""One relayed request: its worker, the next one where that fails before the answer begins, and the
answer's way back.  What no worker takes is handed to the router itself.
"""

import asyncio
from typing import Protocol

from pdcluster_worker.proxy.affinity import affinity_of
from pdcluster_worker.proxy.reverse_proxy import ReverseProxy
from pdcluster_worker.proxy.upstream import Upstream, UpstreamPool


class Client(Protocol):
    """Implemented by `proxy.client_connection.ClientConnection`."""

    closes: bool

    def write(self, data: bytes) -> None: ...

    def end(self, data: bytes) -> None: ...

    def cut(self) -> None: ...

    def hand_over(self) -> None: ...


class ProxiedRequest:
    """request: head and body; nothing once the answer has begun."""

    def __init__(self, relay: ReverseProxy, front: Client, head: bytes, body: bytes) -> None:
        self.request: tuple[bytes, ...] = (head, body)
        self._relay = relay
        self._front = front
        policy = relay.policy()
        self._affinity = affinity_of(policy.relaying, policy.decode_score, body)
        self._tried: list[UpstreamPool] = []
        self._was_stale = False
        self._pool: UpstreamPool | None = None
        self._upstream: Upstream | None = None
        self._connecting: asyncio.Task[None] | None = None

    def start(self) -> None:
        policy = self._relay.policy()
        pool = self._relay.picker.choose(
            policy.relaying, policy.decode_score, self._affinity, self._tried
        )
        if pool is None or len(self._tried) > policy.relaying.max_retries:
            self._relay.count("not_taken")
            self._front.hand_over()
            return
        self._pool = pool
        self._relay.picker.begin(pool)
        upstream = None if self._was_stale else self._relay.idle_upstream(pool)
        if upstream is not None:
            self._send(upstream)
        else:
            self._relay.close_idle_one()
            self._connecting = asyncio.create_task(self._connect(pool))

    def cancel(self) -> None:
        self._relay.count("client_gone")
        if self._connecting is not None:
            self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.leave()
        self._let_go()

    def pause(self) -> None:
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()

    async def _connect(self, pool: UpstreamPool) -> None:
        try:
            upstream = await pool.connect()
        except OSError:  # a TimeoutError too
            self._connecting = None
            self.fail("connect")
            return
        self._connecting = None
        if not pool.is_connected:  # lost while this connection was made
            upstream.close()
            self.fail("lost")
            return
        self._send(upstream)

    def _send(self, upstream: Upstream) -> None:
        self._upstream = upstream
        upstream.send(self)

    def _let_go(self) -> None:
        self._upstream = None
        if (pool := self._pool) is not None:
            self._pool = None
            self._relay.picker.end(pool)

    @property
    def closes(self) -> bool:
        return self._front.closes

    # --- see `proxy.upstream.ResponseSink` --------------------------------------------------------

    def pass_on(self, data: bytes) -> None:
        self.request = ()
        self._front.write(data)

    def end(self, data: bytes) -> None:
        self._let_go()
        self._relay.count("answered")
        self._front.end(data)

    def fail(self, reason: str) -> None:
        self._was_stale |= reason == "stale"
        if (pool := self._pool) is not None and reason != "stale":
            self._tried.append(pool)
        self._let_go()
        self._relay.retried(reason)
        self.start()

    def cut(self) -> None:
        self._let_go()
        self._relay.count("cut")
        self._front.cut()
