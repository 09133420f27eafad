"""One HTTP connection's way in: with an end for a client that sends nothing, too slowly or too much.

A header has a deadline and a size, and so has everything around a body: its
chunks' framing and trailers.  The body itself is `body_limit`'s.  A connection
with a running answer has no deadline here, however long that streams.
"""

import asyncio
import logging
import time
from email.utils import formatdate
from functools import lru_cache, partial
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server import openai_errors
from pdcluster_worker.server.crowd import CROWDED, OpenConnections
from pdcluster_worker.server.limits import HttpLimits
from pdcluster_worker.server.unread import ANSWERED

logger = logging.getLogger(__name__)

_FRAMING_RATIO = 8  # a chunk of one byte has 5 more; what is beyond that has another purpose
_PHRASES = {408: "Request Timeout", 431: "Request Header Fields Too Large"}


@lru_cache(maxsize=1)
def _date(second: int) -> list[tuple[bytes, bytes]]:
    """The Date header, made once a second at most and never while no request comes."""
    return [(b"date", formatdate(second, usegmt=True).encode())]


class Incoming(HttpToolsProtocol):
    """Watches what comes.  crowd: all connections of this server, None = any number."""

    limits = HttpLimits()
    crowd: "OpenConnections[Incoming] | None" = None
    _header_check: asyncio.TimerHandle | None = None
    _num_framing_bytes = 0
    _num_body_bytes = 0

    @property
    def _max_framing_bytes(self) -> int:
        return self.limits.max_header_bytes + _FRAMING_RATIO * self._num_body_bytes

    @property
    def _waits_for_header(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a place, and wait for the first request no longer than for any other."""
        super().connection_made(cast(asyncio.Transport, transport))
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive,
            self.timeout_keep_alive_handler,
        )
        if self.crowd is not None and not self.crowd.enter(self):
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left to watch."""
        self._header_came()
        self._unset_keepalive_if_required()
        if self.crowd is not None:
            self.crowd.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, then see whether it was too much, or the beginning of a header."""
        self._num_framing_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            self._header_came()
        elif self._num_framing_bytes > self._max_framing_bytes:
            self._too_much()
        elif self._header_check is None and self._waits_for_header:
            self._header_check = self.loop.call_later(self.limits.header_seconds, self._too_late)

    def on_message_begin(self) -> None:
        """Count anew."""
        self._num_framing_bytes = self._num_body_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A request."""
        self._header_came()
        self.server_state.default_headers = [*_date(int(time.time())), *self.config.encoded_headers]
        if self.crowd is not None:
            self.scope["state"][ANSWERED] = partial(self.crowd.idle, self)
            if not self.crowd.busy(self):
                self.scope["state"][CROWDED] = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Bytes that are no framing."""
        self._num_framing_bytes -= len(body)
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        """The next request, or the wait for it."""
        super().on_response_complete()
        if self.crowd is not None and self.cycle.response_complete:
            self.crowd.idle(self)

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
        if self._waits_for_header:
            limit = self.limits.max_header_bytes
            message = f"the header has more than {limit} bytes: send less"
            self._end(RequestError(message, status=431, code="header_too_large"))
        else:  # within a body, whose answer may have begun
            self.transport.abort()

    def _end(self, error: RequestError) -> None:
        self._header_came()
        logger.info("connection closed client=%s: %s", self.client, error)
        content = openai_errors.reply(error).model_dump_json().encode()
        lines = [
            f"HTTP/1.1 {error.status} {_PHRASES[error.status]}",
            "content-type: application/json",
            f"content-length: {len(content)}",
            "connection: close",
        ]
        self.transport.write("\r\n".join([*lines, "\r\n"]).encode() + content)
        self.transport.close()
