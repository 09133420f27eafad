"""Connections to workers, one request at a time each; unexpected bytes end a connection."""

import asyncio
import re
import socket
from collections.abc import Iterable
from typing import Protocol, cast

import httptools

from pdcluster_schema.ports import parse_address
from pdcluster_worker.proxy.picker import Candidate

MAX_IDLE = 64
"""Idle connections that are kept to one worker."""

IDLE_SECONDS = 30.0
"""Time for which one is kept at most; less where workers close idle ones sooner."""

CONNECT_SECONDS = 2.0
MAX_HELD_BYTES = 64 << 10
"""Bytes of an answer's head, or of a refusal, before anything of it is passed on."""

# after 5 s without a byte; the connection is given up after 20 s
_SIGNS_OF_LIFE = (
    ("TCP_KEEPIDLE", 5),
    ("TCP_KEEPINTVL", 5),
    ("TCP_USER_TIMEOUT", 20_000),
)
_GOING = re.compile(rb'"code": ?"(draining|not_ready)"')
_CONNECTION = re.compile(rb"\r\n(?:connection|keep-alive)[ \t]*:[^\r]*", re.IGNORECASE)


class ResponseSink(Protocol):
    """Implemented by `client_connection.ClientConnection`.

    closes: the answer is the last of its connection.  end: gets the last bytes of the answer.
    fail: none has begun, and none will from here.  cut: it broke off.
    """

    closes: bool

    def pass_on(self, data: bytes) -> None: ...

    def end(self, data: bytes) -> None: ...

    def fail(self, reason: str) -> None: ...

    def cut(self) -> None: ...


class UpstreamPool(Candidate):
    """key: its pod and engine.  is_connected: by gRPC.  has_drained: it has sent every answer."""

    def __init__(self, pod: str, key: str, address: str) -> None:
        super().__init__(pod)
        self.key = key
        self.host, self.port = parse_address(address)
        self.idle: list[Upstream] = []
        self.upstreams: set[Upstream] = set()
        self.is_connected = True
        self.has_drained = False

    async def connect(self) -> "Upstream":
        """A new connection.  Raises OSError, TimeoutError."""
        async with asyncio.timeout(CONNECT_SECONDS):
            _, upstream = await asyncio.get_running_loop().create_connection(
                lambda: Upstream(self), self.host, self.port
            )
        return upstream

    def close_idle(self, since: float) -> None:
        """Close those that have been idle since then, or longer."""
        while self.idle and self.idle[0].idle_since <= since:
            self.idle.pop(0).close()

    def leave(self, *, moves: bool) -> None:
        """It does not answer by gRPC.  moves: requests without a byte of an answer go elsewhere."""
        self.is_connected = False
        for upstream in self.idle:
            upstream.close()
        self.idle.clear()
        for upstream in [
            upstream for upstream in self.upstreams if moves and not upstream.has_begun
        ]:
            upstream.give_up()

    def abort(self) -> None:
        self.leave(moves=False)
        for upstream in [] if self.has_drained else [*self.upstreams]:
            upstream.give_up()


class Upstream(asyncio.Protocol):
    """is_used: it has carried an answer.  has_begun: bytes of an answer have been passed on."""

    def __init__(self, pool: UpstreamPool) -> None:
        self.is_used = False
        self.idle_since = 0.0
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._sink: ResponseSink | None = None
        self._held = b""
        self._came = self.has_begun = self._has_head = False
        self._is_whole = self._has_more = self._keeps = False

    def send(self, sink: ResponseSink, request: Iterable[bytes]) -> None:
        self._sink = sink
        self._came = self.has_begun = self._has_head = self._is_whole = False
        self._pool.upstreams.add(self)
        self._transport.writelines(request)

    def close(self) -> None:
        """End it now, and with it what the worker does for its request."""
        self._transport.abort()

    def give_up(self) -> None:
        """End it, as if the worker had: its request fails now."""
        self._end_badly("lost")

    def leave(self) -> None:
        """The request has gone: nothing of it is wanted any more."""
        self._sink = None
        self._pool.upstreams.discard(self)
        self._transport.abort()

    def pause(self) -> None:
        self._transport.pause_reading()

    def resume(self) -> None:
        self._transport.resume_reading()

    # --- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _SIGNS_OF_LIFE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:
            self._transport.abort()
            return
        self._came = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._has_more = True
        if self._has_more:
            self._end_badly("not_http")
            return
        if not self.has_begun:
            data = self._first(sink, data)
            if not data:
                return
        if self._is_whole:
            self._free()
            sink.end(data)
        else:
            sink.pass_on(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._sink is not None:
            self._end_badly("stale" if self.is_used and not self._came else "lost")
        elif self in self._pool.idle:
            self._pool.idle.remove(self)

    # --- callbacks of the parser --------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer; a second one was not asked for."""
        self._has_more = self._is_whole

    def on_headers_complete(self) -> None:
        self._has_head = True
        self._keeps = self._parser.should_keep_alive()  # it is not known any more at the end

    def on_message_complete(self) -> None:
        self._is_whole = True

    # --- the beginning and the end of an answer -----------------------------------------------

    def _first(self, sink: ResponseSink, data: bytes) -> bytes:
        """The bytes to begin the answer with; b"" = none yet, or none from here."""
        if self._held:
            data = self._held + data
        status = self._parser.get_status_code() if self._has_head else 0
        may_hold = len(data) < MAX_HELD_BYTES
        if not self._is_whole and may_hold and (not self._has_head or status == 503):
            self._held = data
            return b""
        self._held = b""
        if status < 200:
            self._end_badly("not_http")
            return b""
        if status == 503 and self._is_whole and _GOING.search(data):
            self._free()
            sink.fail("draining")
            return b""
        self.has_begun = True
        if sink.closes or not self._keeps:
            return _with_end(data, closes=sink.closes)
        return data

    def _free(self) -> None:
        """The answer is whole: keep the connection where it may be used again."""
        self._sink = None
        self._pool.upstreams.discard(self)
        idle = self._pool.idle
        if not self._keeps or not self._pool.is_connected or len(idle) >= MAX_IDLE:
            self._transport.close()
            return
        self.is_used = True
        self.idle_since = asyncio.get_running_loop().time()
        idle.append(self)

    def _end_badly(self, reason: str) -> None:
        sink, self._sink = self._sink, None
        self._pool.upstreams.discard(self)
        self._transport.abort()
        if sink is not None:
            if self.has_begun:
                sink.cut()
            else:
                sink.fail(reason)


def _with_end(data: bytes, *, closes: bool) -> bytes:
    r"""The head without what it says of the worker's connection, and with what is to be said of the
    client's.

    >>> _with_end(b"HTTP/1.1 200 OK\r\nConnection: close\r\nx: y\r\n\r\nbody", closes=False)
    b'HTTP/1.1 200 OK\r\nx: y\r\n\r\nbody'
    >>> _with_end(b"HTTP/1.1 200 OK\r\n\r\n", closes=True)
    b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n'
    """
    head, empty_line, body = data.partition(b"\r\n\r\n")
    head = _CONNECTION.sub(b"", head)
    return head + (b"\r\nconnection: close" if closes else b"") + empty_line + body
