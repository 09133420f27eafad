"""A client's connection at a relaying router.  Plain requests are relayed one after the other;
anything else is handed to the router's own server with every byte that came, as if it came there
first.
"""

import asyncio
import logging
from math import inf
from typing import Any, cast

from pdcluster_worker.proxy.proxied_request import ProxiedRequest
from pdcluster_worker.proxy.request_head import BEGIN, RequestHead
from pdcluster_worker.proxy.reverse_proxy import ReverseProxy
from pdcluster_worker.server.http import unacked_responses
from pdcluster_worker.server.http.connection import HttpConnection
from pdcluster_worker.server.http.raw_http import HalfClosed

logger = logging.getLogger(__name__)

SLOW_SECONDS = 1.0
"""Time for the rest of a request; a slower one is the router's own, with its limits of time."""

SEND_SECONDS = 30.0
"""Time for a client to read anything, as at every other connection of a worker."""

MAX_EARLY_BYTES = 64 << 10
"""Bytes of next requests that a client may send before it has its answer; then it has to wait."""

_END = b"\r\n\r\n"


class ClientConnection(asyncio.Protocol):
    """deadline: for `expire`, by the loop.  closes: with the answer that it waits for."""

    relay: ReverseProxy

    def __init__(self, **made: Any) -> None:
        self._made = made
        self._connections = made["server_state"].connections
        self._head = RequestHead()
        self._exchange: ProxiedRequest | None = None
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
        self._missing = 0
        self._num_held = 0
        self._has_place = False

    @property
    def is_answering(self) -> bool:
        """See `server.http.connection.HttpConnection`."""
        return self._exchange is not None or bool(self.transport.get_write_buffer_size())

    @property
    def is_waiting(self) -> bool:
        """True before the head of a request is whole, and with all answers sent."""
        return not (self._raw_head or self.is_answering)

    @property
    def name(self) -> str | None:
        """See `server.http.connection.HttpConnection`."""
        local, remote = (self.transport.get_extra_info(end) for end in ("sockname", "peername"))
        return unacked_responses.name(local[:2], remote[:2]) if local and remote else None

    def shutdown(self) -> None:
        """Take no more requests, as uvicorn asks."""
        if self._exchange is None and not self._raw_head and not self._early:
            self.transport.close()
        self.closes = True

    # --- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a place among the connections."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=0)  # else a little would be unsent unwatched
        self._connections.add(self)
        peer = transport.get_extra_info("peername")
        self._client = str(peer[0]).encode() if peer else b"unknown"
        self._wait()
        self.relay.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._forget()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.cancel()

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
        return self._exchange is not None and bool(self._num_held)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of a later one."""
        if self._exchange is not None or self._unsent:
            self._early += data
            if len(self._early) > MAX_EARLY_BYTES:
                self.transport.pause_reading()
        elif self._raw_head:
            self._take_body(data)
        else:
            self._take_head(self._early + data if self._early else data)

    def pause_writing(self) -> None:
        """The socket takes no more: neither do we."""
        self._unsent = self.transport.get_write_buffer_size()
        self.deadline = self.relay.now() + SEND_SECONDS
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        """It takes more."""
        self._unsent = 0
        if self._exchange is not None:
            self.deadline = inf
            self._exchange.resume()
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
                self.hand_over("route")
            elif len(data) > relay.max_header_bytes:
                self.hand_over("size")
            else:
                self.deadline = min(self.deadline, relay.now() + SLOW_SECONDS)
            return
        self._early = b""
        self._raw_head = data[:end]
        reason = relay.reason_against(self._head, self._raw_head)
        if reason is not None:
            self._early = data[end:]
            self.hand_over(reason)
            return
        self._missing = self._head.length
        self._num_held = self._head.length
        self._has_place = True
        relay.begin_request(self._num_held)
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
            self.hand_over("form")
        elif not self._missing:
            self._send()

    def _send(self) -> None:
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks = [body]
        self.deadline = inf
        self.closes |= self._head.closes or self.relay.is_draining()
        head = self._head.forwarded(self._client)
        self._exchange = ProxiedRequest(self.relay, self, head, body)
        self._exchange.start()

    # --- its answer ---------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """A part of the answer: no other worker is tried from now on."""
        if self._num_held:
            self._let_go()
        self.transport.write(data)

    def end(self, data: bytes) -> None:
        """The last part: then the next request."""
        self._exchange = None
        self._end_request()
        self._begin()
        self.transport.write(data)
        if self.closes:
            self.transport.close()
            return
        if not self._unsent:
            self._next()

    def _next(self) -> None:
        """Take the next request, or wait for it."""
        self._wait()
        if self._early:
            if not self.transport.is_reading():
                self.transport.resume_reading()
            early, self._early = self._early, b""
            self._take_head(early)

    def cut(self) -> None:
        """The answer broke off: so does the connection, after what has come of it."""
        self._exchange = None
        self.transport.close()

    # --- ends ---------------------------------------------------------------------------------

    def hand_over(self, reason: str = "worker") -> None:
        """Give the connection to the router's own server, with all that came."""
        self.relay.count_own(reason)
        came = b"".join((self._raw_head, *self._chunks, self._early))
        returns = self.relay.is_on
        self._exchange = None
        self._forget()
        self.relay.hand_over(self.transport, self._made, came, returns=returns)

    def expire(self, now: float) -> None:
        """The deadline has passed."""
        if self._unsent:
            self._check_reader(now)
        elif self._raw_head or self._early:
            self.hand_over("slow")
        else:
            self.transport.close()

    def _check_reader(self, now: float) -> None:
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes < self._unsent:
            self._unsent, self.deadline = unsent_bytes, now + SEND_SECONDS
            return
        logger.warning("client stopped reading, connection aborted unsent_bytes=%d", unsent_bytes)
        self.transport.abort()

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
            self.relay.end_request()

    def _let_go(self) -> None:
        """The body is not needed any more."""
        self._chunks = []
        self.relay.let_go(self._num_held)
        self._num_held = 0


def proxy_protocol(relay: ReverseProxy, ordinary: type[HttpConnection]) -> type[asyncio.Protocol]:
    relay.hand_over_to(ordinary)
    return type("ProxyConnection", (ClientConnection,), {"relay": relay})
