"""Heads of requests: which are plain enough to be relayed, and what the worker is sent."""

from collections.abc import Callable
from typing import Literal

import httptools

Reason = Literal["route", "form", "key", "size"]
"""Reason not to relay a request: its method or path; its framing or syntax; its key; its size."""

PATHS = frozenset(
    {
        b"/v1/chat/completions",
        b"/v1/completions",
        b"/v1/messages",
        b"/v1/messages/count_tokens",
        b"/tokenize",
        b"/detokenize",
    }
)
"""Routes with a body that keep nothing in a worker, as /v1/responses does."""

BEGIN = b"POST /"
_ODD = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"http2-settings", b"trailer"})
_ENDS = frozenset({b"close", b"keep-alive"})
_DROPPED = frozenset({b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te"})
_REWRITTEN = frozenset(
    {*_ODD, *_DROPPED, b"content-length", b"connection", b"x-forwarded-for"}
)  # of these a worker gets its own form, or none
_READ = frozenset({*_REWRITTEN, b"host", b"authorization", b"x-api-key", b"x-forwarded-proto"})

HasKey = Callable[[bytes, bytes], bool] | None
"""Tells if these values of Authorization and X-API-Key have a valid key; None = none is needed."""


class RequestHead:
    """A plain one has one meaning for every reader: HTTP/1.1, a POST to a known path, one
    Content-Length.

    length: of the body.  closes: with this request.  is_whole: the end of the body too."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self.is_whole = False

    def read(self, head: bytes, max_fields: int, has_key: HasKey) -> Reason | None:
        """Read a head, its empty line included; None = it may be relayed."""
        self.url = b""
        self._fields: list[bytes] = []
        self._read: dict[bytes, list[bytes]] = {}
        self._num_fields = 0
        self.is_whole = False
        try:
            self._parser.feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return "form"
        read = self._read
        self.length = int(read.get(b"content-length", (b"-1",))[-1])  # digits, by the parser
        ends = [value.lower() for value in read.get(b"connection", ())]
        self.closes = bool(ends) and ends[-1] == b"close"
        is_plain = _ODD.isdisjoint(read) and _ENDS.issuperset(ends)
        has_one_host = len(read.get(b"host", ())) == 1
        if not (is_plain and has_one_host and self.length > 0):
            return "form"
        if self._parser.get_http_version() != "1.1":
            return "form"
        if self.url not in PATHS:
            return "route"
        if self._num_fields > max_fields:
            return "size"
        if has_key is None or has_key(self._first(b"authorization"), self._first(b"x-api-key")):
            return None
        return "key"

    def _first(self, name: bytes) -> bytes:
        return next((value for value in self._read.get(name, ()) if value), b"")

    def take_body(self, data: bytes) -> bool:
        """A part of the body; False when the parser sees another end than its length says."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return False
        return True

    def forwarded(self, client: bytes) -> bytes:
        """The head for a worker.  client: address of the one that is connected."""
        proto = b"" if b"x-forwarded-proto" in self._read else b"x-forwarded-proto: http\r\n"
        return b"POST %b HTTP/1.1\r\n%bx-forwarded-for: %b\r\n%bcontent-length: %d\r\n\r\n" % (
            self.url,
            b"".join(self._fields),
            b", ".join(filter(None, (*self._read.get(b"x-forwarded-for", ()), client))),
            proto,
            self.length,
        )

    # --- callbacks of the parser --------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        """The target: whole, since a head is read in one piece."""
        self.url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        lower = name.lower()
        if lower in _READ:
            self._read.setdefault(lower, []).append(value)
        if lower not in _REWRITTEN:
            self._fields.append(b"%b: %b\r\n" % (name, value))

    def on_message_complete(self) -> None:
        self.is_whole = True
