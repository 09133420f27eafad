"""One HTTP connection of uvicorn, with limits for clients that send or read too slowly."""

import asyncio
import logging
import time
from functools import partial
from typing import cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.http.limits import (
    ANSWERED,
    TOO_MANY_CONNECTIONS,
    HttpLimits,
    LimitsNow,
    OpenConnections,
)
from pdcluster_worker.server.http.raw_http import (
    DIRECT_WRITER,
    DirectWriter,
    HalfClosed,
    date_header,
    error_answer,
    without_offer,
)

logger = logging.getLogger(__name__)

Addresses = tuple[tuple[str, int], tuple[str, int]]
"""(host, port) of this end of a connection and of the client's."""

SEND_SECONDS = 30.0
"""Time without progress of a client that reads nothing: its connection is aborted."""

_FRAMING_RATIO = 8  # a chunk of one byte has 5 more; what is beyond that has another purpose
_FIELD_BYTES = 4  # overhead of a header field over its name and value
# of a refused client: no honest one sends a header of so much before it reads
_DROPPED_BYTES = 1 << 20
_NOT_HTTP = (
    "this is not a request of HTTP/1.1: send a request line, header fields and a body as RFC 9112 "
    "has them"
)


class HttpConnection(HttpToolsProtocol):
    """open_connections: all connections of this server, None = any number."""

    send_seconds = SEND_SECONDS

    limits_now: LimitsNow = HttpLimits
    open_connections: OpenConnections | None = None
    limits = HttpLimits()
    _header_check: asyncio.TimerHandle | None = None
    _refusal: RequestError | None = None
    _num_framing_bytes = 0
    _num_body_bytes = 0
    _num_header_bytes = 0
    _num_dropped_bytes: int | None = None  # None until the client is refused
    _half_closed: HalfClosed | None = None
    _send_check: asyncio.TimerHandle | None = None

    @property
    def is_answering(self) -> bool:
        """True if a request has come whole and its answer has not gone whole to the kernel."""
        if self.pipeline or self.transport.get_write_buffer_size():
            return True
        cycle = self.cycle  # of the last request that has begun to come; None before the first
        return bool(cycle and not cycle.more_body and not cycle.response_complete)

    @property
    def addresses(self) -> Addresses | None:
        """None for a client that had gone before it was known."""
        if self.server is None or self.client is None:
            return None
        host, port = self.server
        return (host, port or 0), self.client

    @property
    def _max_framing_bytes(self) -> int:
        return self.limits.max_header_bytes + _FRAMING_RATIO * self._num_body_bytes

    @property
    def _waits_for_header(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Writers wait while anything is unsent, so that it shrinks only when the client reads."""
        super().connection_made(cast(asyncio.Transport, transport))
        self.transport.set_write_buffer_limits(high=0)
        self._take_limits()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive,
            self.timeout_keep_alive_handler,
        )
        if self.open_connections is not None and not self.open_connections.enter(self.transport):
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_send_check()
        self._header_came()
        self._unset_keepalive_if_required()
        if self._half_closed is not None:
            self._half_closed.stop()
        if self.open_connections is not None:
            self.open_connections.leave(self.transport)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's always closes
        """True keeps the connection for its answer, unless the client ends in the middle of one."""
        is_requested = not self._waits_for_header and not self.cycle.more_body
        if not is_requested or self.cycle.response_started or self._num_dropped_bytes is not None:
            return False
        self.cycle.keep_alive = False
        if self._half_closed is None:
            takes_interim = self.scope["http_version"] == "1.1"
            self._half_closed = HalfClosed(
                self.transport, self._has_begun, takes_interim=takes_interim
            )
        return True

    def _has_begun(self) -> bool:
        return bool(self.pipeline) or self.cycle.response_started

    def data_received(self, data: bytes) -> None:
        if self._num_dropped_bytes is not None:
            self._drop(data)
            return
        self._num_framing_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self.transport.is_closing() or self._num_dropped_bytes is not None:
            self._header_came()
        elif self._num_framing_bytes > self._max_framing_bytes:
            self._too_much()
        elif self._header_check is None and self._waits_for_header:
            self._header_check = self.loop.call_later(self.limits.header_seconds, self._too_late)

    def on_message_begin(self) -> None:
        self._take_limits()
        self._num_framing_bytes = self._num_body_bytes = self._num_header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + _FIELD_BYTES)
        if len(self.headers) >= self.limits.max_headers:
            self._refuse_large(
                f"the header has more than {self.limits.max_headers} fields: send fewer"
            )
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A request, or one that will come again without its offer of another protocol."""
        if self.parser.should_upgrade():
            return
        self._check_host()
        self._header_came()
        date = date_header(int(time.time()))
        self.server_state.default_headers = [*date, *self.config.encoded_headers]
        if self.open_connections is not None:
            self.scope["state"][ANSWERED] = partial(self.open_connections.idle, self.transport)
            if not self.open_connections.busy(self.transport):
                self.scope["state"][TOO_MANY_CONNECTIONS] = True
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before and self.scope["method"] == "POST":
            self.scope["state"][DIRECT_WRITER] = DirectWriter(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_framing_bytes -= len(body)
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.open_connections is not None and self.cycle.response_complete:
            self.open_connections.idle(self.transport)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as e:
            self._pass_over_offer(data[e.args[0] :])
        except httptools.HttpParserError:  # of its own, or since a callback refused
            self._end(self._refusal or RequestError(_NOT_HTTP, code="not_http"))

    def _pass_over_offer(self, rest: bytes) -> None:
        """Take the request as one that offers nothing.  rest: what came after its header."""
        method = self.parser.get_method()
        if method == b"CONNECT":  # it is an offer itself
            self._end(RequestError("CONNECT is not allowed: this server is no proxy", status=405))
            return
        head = without_offer((method, self.url, self.parser.get_http_version()), self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self._feed(head + rest)

    def _take_limits(self) -> None:
        self.limits = type(self).limits_now()
        self.timeout_keep_alive = self.limits.keep_alive_seconds

    def _count_header(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > self.limits.max_header_bytes:
            self._refuse_large(self._too_long)

    def _check_host(self) -> None:
        """RFC 9112: one Host in each request of HTTP/1.1; of two, readers might take either."""
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            message = f"the header has {num_hosts} fields Host: send one"
            self._refuse(RequestError(message, code="not_http"))

    def _refuse_large(self, message: str) -> None:
        self._refuse(RequestError(message, status=431, code="header_too_large"))

    def _refuse(self, error: RequestError) -> None:
        """End the parsing, from within one of its callbacks: the parser wraps what they raise."""
        self._refusal = error
        raise error

    @property
    def _too_long(self) -> str:
        return (
            f"the header, or what is around the body, has more than {self.limits.max_header_bytes} "
            "bytes: send less"
        )

    def _header_came(self) -> None:
        if self._header_check is not None:
            self._header_check.cancel()
            self._header_check = None

    def _too_late(self) -> None:
        if not self.transport.is_closing():
            seconds = self.limits.header_seconds
            message = f"the header did not come whole in {seconds:g} s: send it at once"
            self._end(RequestError(message, status=408, code="header_timeout"))

    def _too_much(self) -> None:
        self._end(RequestError(self._too_long, status=431, code="header_too_large"))

    def _end(self, error: RequestError) -> None:
        """Answer and linger, or cut off an answer that has begun or is another request's."""
        self._header_came()
        logger.info("connection closed client=%s: %s", self.client, error)
        if not self._waits_for_header and (self.cycle.response_started or not self.cycle.more_body):
            self.transport.abort()
            return
        self.transport.write(error_answer(error))
        self._num_dropped_bytes = 0
        self._unset_keepalive_if_required()
        if not self._waits_for_header:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        if self.open_connections is not None:
            self.open_connections.idle(self.transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.limits.linger_seconds, self.transport.close
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _drop(self, data: bytes) -> None:
        self._num_dropped_bytes = (self._num_dropped_bytes or 0) + len(data)
        if self._num_dropped_bytes > _DROPPED_BYTES:
            self.transport.close()

    # --- the way out --------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_sending_later()

    def resume_writing(self) -> None:
        self._stop_send_check()
        super().resume_writing()

    def _check_sending_later(self) -> None:
        self._send_check = self.loop.call_later(
            self.send_seconds, self._check_sending, self.transport.get_write_buffer_size()
        )

    def _check_sending(self, unsent_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < unsent_bytes:
            self._check_sending_later()
            return
        logger.warning(
            "client stopped reading, connection aborted client=%s unsent_bytes=%d",
            self.client,
            unsent_bytes,
        )
        self.transport.abort()

    def _stop_send_check(self) -> None:
        if self._send_check is not None:
            self._send_check.cancel()
            self._send_check = None
