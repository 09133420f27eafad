"""Heads of requests: which are plain enough to be relayed (one meaning for every reader: HTTP/1.1,
a POST to a known path, one Content-Length), and what the worker is sent, written from parsed
fields.
"""

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
_DROPPED = frozenset({b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te"})
_SPECIAL = frozenset(
    {
        *_ODD,
        *_DROPPED,
        *(b"content-length", b"connection", b"host", b"authorization", b"x-api-key"),
        *(b"x-forwarded-for", b"x-forwarded-proto"),
    }
)

HasKey = Callable[[bytes, bytes], bool] | None
"""Tells if the values of Authorization and X-API-Key have a key that is valid now; None = no key is
asked for.
"""


class RequestHead:
    """length: of the body.  closes: with this request.  is_whole: the end of the body too."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self.is_whole = False

    def read(self, head: bytes, max_fields: int, has_key: HasKey) -> Reason | None:
        """Read a head, its empty line included; None = it may be relayed."""
        self.url = self._hosts = self._forwarded = b""
        self._fields: list[bytes] = []
        self._num_fields = 0
        self.length = -1
        self.closes = self.is_whole = self._is_odd = self._has_proto = False
        self._authorization = self._api_key = b""
        try:
            self._parser.feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return "form"
        is_odd = self._is_odd or not self._hosts or self.length <= 0
        if is_odd or self._parser.get_http_version() != "1.1":
            return "form"
        if self.url not in PATHS:
            return "route"
        if self._num_fields > max_fields:
            return "size"
        return None if has_key is None or has_key(self._authorization, self._api_key) else "key"

    def take_body(self, data: bytes) -> bool:
        """A part of the body; False when the parser sees another end than its length says."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return False
        return True

    def forwarded(self, client: bytes) -> bytes:
        """The head for a worker.  client: address of the one that is connected."""
        before = b"%b, " % self._forwarded if self._forwarded else b""
        proto = b"" if self._has_proto else b"x-forwarded-proto: http\r\n"
        return b"POST %b HTTP/1.1\r\n%bx-forwarded-for: %b%b\r\n%bcontent-length: %d\r\n\r\n" % (
            self.url,
            b"".join(self._fields),
            before,
            client,
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
        if lower in _SPECIAL and not self._take_special(lower, value):
            return
        self._fields.append(b"%b: %b\r\n" % (name, value))

    def on_message_complete(self) -> None:
        self.is_whole = True

    def _take_special(self, name: bytes, value: bytes) -> bool:
        if name == b"content-length":
            self.length = int(value)  # digits: the parser has seen to that
        elif name == b"connection":
            self.closes = value.lower() == b"close"
            self._is_odd |= value.lower() not in (b"close", b"keep-alive")
        elif name == b"x-forwarded-for":
            self._forwarded = b"%b, %b" % (self._forwarded, value) if self._forwarded else value
        elif name == b"host":
            self._is_odd |= bool(self._hosts)
            self._hosts = b"?" + value
            return True
        elif name == b"x-forwarded-proto":
            self._has_proto = True
            return True
        elif name == b"authorization":
            self._authorization = self._authorization or value
            return True
        elif name == b"x-api-key":
            self._api_key = self._api_key or value
            return True
        else:
            self._is_odd |= name in _ODD
        return False
