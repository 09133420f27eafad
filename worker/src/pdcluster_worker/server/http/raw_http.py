"""Bytes of HTTP that neither the parser nor uvicorn makes, and streamed events past its layers."""

import asyncio
import socket
import weakref
from collections.abc import Callable, Iterable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import openai_error

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"

_FIRST_SECONDS = 0.1
_MAX_SECONDS = 10.0
_UNKNOWN_SECONDS = 10.0
"""Time for the first byte of an answer to a client that may have gone."""

_OFFER = (b"upgrade", b"http2-settings")


@lru_cache(maxsize=1)
def date_header(second: int) -> list[tuple[bytes, bytes]]:
    """Made once a second at most, and never while no request comes."""
    return [(b"date", formatdate(second, usegmt=True).encode())]


def error_answer(error: RequestError) -> bytes:
    content = openai_error(error).model_dump_json().encode()
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(content)}",
        "connection: close",
    ]
    return "\r\n".join([*lines, "\r\n"]).encode() + content


def without_offer(
    request_line: tuple[bytes, bytes, str], headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    r"""The header of a request, less what offers another protocol.

    request_line: method, target and the version's number
    headers:      names in lower case, and values

    >>> without_offer((b"GET", b"/", "1.1"), [(b"upgrade", b"h2c"), (b"connection",
    ...     b"Upgrade, close")])
    b'GET / HTTP/1.1\r\nconnection: close\r\n\r\n'
    """
    method, target, version = request_line
    lines = [b"%s %s HTTP/%s" % (method, target, version.encode())]
    for name, value in headers:
        if name == b"connection":
            tokens = (token.strip() for token in value.split(b","))
            value = b", ".join(token for token in tokens if token.lower() not in _OFFER)
        if name not in _OFFER and value:
            lines.append(b"%s: %s" % (name, value))
    return b"\r\n".join([*lines, b"\r\n"])


DIRECT_WRITER = "pdcluster.direct_writer"
"""Key in the scope's state of the `DirectWriter` of a request's answer; absent = there is none."""


class DirectWriter:
    """Implements `streams.Reader` for parts of a body that are not its last: a quarter of what a
    token costs the server is saved.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # it holds the scope, and the scope's state this

    @property
    def is_open(self) -> bool:
        """True if the answer is in chunks, has begun, and waits for no client."""
        if (cycle := self._cycle()) is None:
            return False
        is_under_way = cycle.response_started and not cycle.response_complete
        can_be_written = not cycle.disconnected and not cycle.flow.write_paused
        return is_under_way and can_be_written and bool(cycle.chunked_encoding)

    def take(self, item: bytes) -> None:
        cycle = self._cycle()
        assert cycle is not None, "a writer that is open has an answer"
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(item), item))


class HalfClosed:
    """A connection whose client has ended its sending side: it waits for its answer, or has gone.
    An interim response tells them apart: one that has gone resets the connection.  HTTP/1.0, which
    proxies that end an abandoned request speak, knows none: such a client is waited for shortly.

    is_begun: a part of the answer is out, after which no interim response may come.
    """

    def __init__(
        self, transport: asyncio.Transport, is_begun: Callable[[], bool], *, takes_interim: bool
    ) -> None:
        self._transport = transport
        self._is_begun = is_begun
        self._takes_interim = takes_interim
        self._seconds = 0.0
        self._poll_after(_FIRST_SECONDS)

    def _poll_after(self, seconds: float) -> None:
        self._check = asyncio.get_running_loop().call_later(seconds, self._poll, seconds)

    def _poll(self, seconds: float) -> None:
        """Abort what was reset since the last interim response, or send another one."""
        if self._transport.is_closing():
            return
        self._seconds += seconds
        connection: socket.socket = self._transport.get_extra_info("socket")
        is_unknown = not self._takes_interim and self._seconds > _UNKNOWN_SECONDS
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or (
            is_unknown and not self._is_begun()
        ):
            self._transport.abort()
            return
        if self._takes_interim and not self._is_begun():
            self._transport.write(INTERIM)
        self._poll_after(min(2 * seconds, _MAX_SECONDS))

    def stop(self) -> None:
        self._check.cancel()
