"""Bytes of HTTP that neither the parser nor uvicorn makes, and streamed events that go to their
socket by a call past the layers of the application: a quarter of what a token costs the server.
"""

import weakref
from collections.abc import Iterable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import openai

_OFFER = (b"upgrade", b"http2-settings")


@lru_cache(maxsize=1)
def date_header(second: int) -> list[tuple[bytes, bytes]]:
    """Made once a second at most, and never while no request comes."""
    return [(b"date", formatdate(second, usegmt=True).encode())]


def error_answer(error: RequestError) -> bytes:
    content = openai.reply(error).model_dump_json().encode()
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
    """Implements `streams.Reader` for parts of a body that are not its last."""

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
