"""Bytes of HTTP that neither the parser nor uvicorn makes."""

from collections.abc import Iterable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

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
