"""A client's connection at a relaying router, and the request that it relays."""

import asyncio
import logging
from math import inf
from typing import Any, cast

from pdcluster_worker.errors import RequestError
from pdcluster_worker.proxy.picker import affinity_of
from pdcluster_worker.proxy.request_head import BEGIN, RequestHead
from pdcluster_worker.proxy.reverse_proxy import ReverseProxy
from pdcluster_worker.proxy.upstream import Upstream, UpstreamPool
from pdcluster_worker.server.errors import error_event
from pdcluster_worker.server.http.connection import Addresses, HttpConnection
from pdcluster_worker.server.http.raw_http import HalfClosed

logger = logging.getLogger(__name__)

SLOW_SECONDS = 1.0
"""Time for the rest of a request; a slower one is the router's own, with its limits of time."""

SEND_SECONDS = 30.0
"""Time for a client to read anything, as at every other connection of a worker."""

MAX_EARLY_BYTES = 64 << 10
"""Bytes of next requests that a client may send before it has its answer; then it has to wait."""

_END = b"\r\n\r\n"

_EVENT_END = b"\n\n\r\n"
"""Ends an event and its chunk: no JSON has a line break, and no event begins with one."""

_LOST = RequestError(
    "the worker of this answer broke off: send it again", status=503, code="decode_worker_lost"
)


class ClientConnection(asyncio.Protocol):
    """Plain requests are relayed one after the other, each to the next worker where one fails
    before the answer begins; anything else goes to the router's own server with all that came.

    deadline: for `expire`, by the loop.  closes: with the answer that it waits for.
    """

    relay: ReverseProxy

    def __init__(self, **made: Any) -> None:
        self._made = made
        self._connections = made["server_state"].connections
        self._head = RequestHead()
        self._early = b""
        self._unsent = 0
        self._half_closed: HalfClosed | None = None
        self.closes = False
        self.deadline = inf
        self._begin()

    def _begin(self) -> None:
        """Wait for a request."""
        self._raw_head = b""
        self._chunks: list[bytes] = []
        self._missing = self._num_held = 0
        self._has_place = self._is_relayed = self._was_stale = False
        self._affinity = self._tail = b""
        self._error: RequestError | None = None
        self._tried: list[UpstreamPool] = []
        self._pool: UpstreamPool | None = None
        self._upstream: Upstream | None = None
        self._connecting: asyncio.Task[None] | None = None

    @property
    def is_answering(self) -> bool:
        """See `server.http.connection.HttpConnection`."""
        return self._is_relayed or bool(self.transport.get_write_buffer_size())

    @property
    def is_waiting(self) -> bool:
        """True before the head of a request is whole, and with all answers sent."""
        return not (self._raw_head or self.is_answering)

    @property
    def addresses(self) -> Addresses | None:
        """See `server.http.connection.HttpConnection`."""
        local, remote = (self.transport.get_extra_info(end) for end in ("sockname", "peername"))
        return (local[:2], remote[:2]) if local and remote else None

    def shutdown(self) -> None:
        """Take no more requests, as uvicorn asks."""
        if not (self._is_relayed or self._raw_head or self._early):
            self.transport.close()
        self.closes = True

    # --- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=0)  # else a little would be unsent unwatched
        self._connections.add(self)
        peer = transport.get_extra_info("peername")
        self._client = str(peer[0]).encode() if peer else b"unknown"
        self._wait()
        self.relay.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if not self._is_relayed:
            return
        self.relay.count("client_gone")
        self._give_up_worker()
        self._is_relayed = False

    def eof_received(self) -> bool:
        """As `HttpConnection.eof_received`."""
        if not self._waits_for_answer():
            return False
        self.closes = True
        if self._half_closed is None:
            self._half_closed = HalfClosed(
                self.transport, lambda: not self._waits_for_answer(), takes_interim=True
            )
        return True

    def _waits_for_answer(self) -> bool:
        """True until a part of the answer has gone out: the body is kept as long."""
        return self._is_relayed and bool(self._num_held)

    def data_received(self, data: bytes) -> None:
        if self._is_relayed or self._unsent:
            self._early += data
            if len(self._early) > MAX_EARLY_BYTES:
                self.transport.pause_reading()
        elif self._raw_head:
            self._take_body(data)
        else:
            self._take_head(self._early + data if self._early else data)

    def pause_writing(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self.deadline = self.relay.now() + SEND_SECONDS
        if self._upstream is not None:
            self._upstream.pause()

    def resume_writing(self) -> None:
        self._unsent = 0
        if self._is_relayed:
            self.deadline = inf
            if self._upstream is not None:
                self._upstream.resume()
        elif not self.transport.is_closing():
            self._next()

    # --- a request on its way in --------------------------------------------------------------

    def _take_head(self, data: bytes) -> None:
        end = data.find(_END) + len(_END)
        relay = self.relay
        is_known = BEGIN.startswith(data[: len(BEGIN)])
        if end < len(_END) or not is_known or not relay.is_on:
            self._early = data
            if not is_known or not relay.is_on:
                self._hand_over("route")
            elif len(data) > relay.max_header_bytes:
                self._hand_over("size")
            else:
                self.deadline = min(self.deadline, relay.now() + SLOW_SECONDS)
            return
        self._early = b""
        self._raw_head = data[:end]
        reason = relay.reason_against(self._head, self._raw_head)
        if reason is not None:
            self._early = data[end:]
            self._hand_over(reason)
            return
        self._missing = self._num_held = self._head.length
        self._has_place = True
        relay.num_held_bytes += self._num_held
        relay.num_requests += 1
        self.deadline = relay.now() + SLOW_SECONDS
        if len(data) > end:
            self._take_body(data[end:])

    def _take_body(self, data: bytes) -> None:
        if len(data) > self._missing:
            self._early = data[self._missing :]
            data = data[: self._missing]
        self._missing -= len(data)
        self._chunks.append(data)
        if not self._head.take_body(data) or self._head.is_whole != (self._missing == 0):
            self._hand_over("form")
        elif not self._missing:
            self._relay()

    def _relay(self) -> None:
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks = [body]
        self.deadline = inf
        self.closes |= self._head.closes or self.relay.is_draining()
        self._is_relayed = True
        self._forwarded = self._head.forwarded(self._client)
        policy = self.relay.policy()
        self._affinity = affinity_of(policy.relaying, policy.decode_score, body)
        self._choose()

    # --- at a worker --------------------------------------------------------------------------

    def _choose(self) -> None:
        """Send the request to a worker; what no worker takes is the router's own."""
        policy = self.relay.policy()
        pool = self.relay.picker.choose(
            policy.relaying, policy.decode_score, self._affinity, self._tried
        )
        if pool is None or len(self._tried) > policy.relaying.max_retries:
            self.relay.count("not_taken")
            self._hand_over("worker")
            return
        self._pool = pool
        self.relay.picker.begin(pool)
        upstream = None if self._was_stale else self.relay.idle_upstream(pool)
        if upstream is not None:
            self._send(upstream)
        else:
            self.relay.close_idle_one()
            self._connecting = asyncio.create_task(self._connect(pool))

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
        upstream.send(self, (self._forwarded, *self._chunks))

    def _give_up_worker(self) -> None:
        """End what it does for this request."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._upstream is not None:
            self._upstream.leave()
        self._leave_worker()

    def _leave_worker(self) -> None:
        self._upstream = None
        if (pool := self._pool) is not None:
            self._pool = None
            self.relay.picker.end(pool)

    # --- its answer ---------------------------------------------------------------------------

    def pass_on(self, data: bytes) -> None:
        if self._num_held:
            self._let_go()
        self.transport.write(data)
        self._tail = data[-4:] if len(data) >= 4 else (self._tail + data)[-4:]
        if self._error is not None:
            self._end_stream(self._error)

    def end(self, data: bytes) -> None:
        self._leave_worker()
        self.relay.count("answered")
        self._end_request()
        self._begin()
        self.transport.write(data)
        if self.closes:
            self.transport.close()
        elif not self._unsent:
            self._next()

    def fail(self, reason: str) -> None:
        self._was_stale |= reason == "stale"
        if (pool := self._pool) is not None and reason != "stale":
            self._tried.append(pool)
        self._leave_worker()
        self.relay.retried(reason)
        self._choose()

    def cut(self) -> None:
        if not self._end_stream(_LOST):
            self._close_cut()

    # --- an answer that breaks off ------------------------------------------------------------

    def break_off(self, error: RequestError) -> bool:
        """End the answer by this error, a stream after its event; False if there is none.  What
        has not begun is the router's own, which answers with its error.
        """
        if not self._is_relayed:
            return False
        if self._num_held:
            self._give_up_worker()
            self._hand_over("worker")
        elif not self._end_stream(error):
            self._error = error
        return True

    def _end_stream(self, error: RequestError) -> bool:
        """Return False if what has gone out does not end with an event."""
        if self._tail != _EVENT_END:
            return False
        event = error_event(error, {"path": self._head.url.decode()})
        self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
        self._close_cut()
        return True

    def _close_cut(self) -> None:
        self._give_up_worker()
        self._is_relayed = False
        self.relay.count("cut")
        self.transport.close()

    def _next(self) -> None:
        """Take the next request, or wait for it."""
        self._wait()
        if self._early:
            if not self.transport.is_reading():
                self.transport.resume_reading()
            early, self._early = self._early, b""
            self._take_head(early)

    # --- ends ---------------------------------------------------------------------------------

    def _hand_over(self, reason: str) -> None:
        """Give the connection to the router's own server, with all that came."""
        self.relay.count_own(reason)
        came = b"".join((self._raw_head, *self._chunks, self._early))
        returns = self.relay.is_on
        self._is_relayed = False
        self._forget()
        self.relay.hand_over(self.transport, self._made, came, returns=returns)

    def expire(self, now: float) -> None:
        """The deadline has passed."""
        if self._unsent:
            unsent_bytes = self.transport.get_write_buffer_size()
            if unsent_bytes < self._unsent:
                self._unsent, self.deadline = unsent_bytes, now + SEND_SECONDS
                return
            logger.warning(
                "client stopped reading, connection aborted unsent_bytes=%d", unsent_bytes
            )
            self.transport.abort()
        elif self._raw_head or self._early:
            self._hand_over("slow")
        else:
            self.transport.close()

    def _wait(self) -> None:
        self.deadline = self.relay.now() + self.relay.keep_alive_seconds

    def _forget(self) -> None:
        """Leave the connections that are watched, and give back what is held."""
        if self._half_closed is not None:
            self._half_closed.stop()
        self._connections.discard(self)
        self.relay.leave(self)
        self._end_request()

    def _end_request(self) -> None:
        self._let_go()
        if self._has_place:
            self._has_place = False
            self.relay.num_requests -= 1

    def _let_go(self) -> None:
        """The body is not needed any more: no other worker is tried from now on."""
        self._chunks = []
        self.relay.num_held_bytes -= self._num_held
        self._num_held = 0


def proxy_protocol(relay: ReverseProxy, ordinary: type[HttpConnection]) -> type[asyncio.Protocol]:
    relay.hand_over_to(ordinary)
    return type("ProxyConnection", (ClientConnection,), {"relay": relay})
