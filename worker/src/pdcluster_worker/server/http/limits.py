"""Limits of the HTTP server: its connections, and the bodies of requests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdcluster_schema.service import HttpLimitsSpec
from pdcluster_schema.text import shortened
from pdcluster_worker.errors import RequestError


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Defaults of every worker."""

    max_connections: int = 2048  # with an open request at once, such as a stream that runs
    spare_connections: int = 64  # beyond these, for probes and scrapes
    # For the next request, or the first: longer than the idle time of common clients' pools, so
    # that they close first.
    keep_alive_seconds: int = 75
    header_seconds: float = 10.0  # from the first byte of a request to the end of its header
    # Trailers and the framing of chunks may have as much again, and 8 times the body.
    max_header_bytes: int = 64 << 10
    max_headers: int = 128  # fields of a header, trailers included
    body_seconds: float = 10.0  # from the header to the end of the body,
    body_bytes_per_second: int = 64 << 10  # and one second more for as many bytes that have come
    max_bodies_bytes: int = 256 << 20  # of all open requests together, as far as they have come
    # After an answer that did not wait for the body: closing at once would reset the connection,
    # and the answer might be lost.  What comes is dropped.
    linger_seconds: float = 5.0
    linger_bytes: int = 64 << 20

    def body_deadline(self, num_bytes: int) -> float:
        """Seconds after the header in which the body must end, when so many bytes have come."""
        return self.body_seconds + num_bytes / self.body_bytes_per_second


LimitsNow = Callable[[], HttpLimits]
"""Returns the limits in force now."""


@lru_cache(maxsize=4)
def limits_of(policy: HttpLimitsSpec) -> HttpLimits:
    return HttpLimits(**dict(policy))


ANSWERED = "pdcluster.answered"
"""Key in the scope's state of the function to call once the client has its whole answer; absent =
none.
"""

_TOO_SLOW = 408

TOO_MANY_CONNECTIONS = "pdcluster.crowded"
"""Mark in the scope's state of a request that came while as many others were open as may be."""


class OpenConnections:
    """A new one takes the place of the longest idle one.  most: with an open request.  spare: for
    probes, which uvicorn's `limit_concurrency` answers with 503 too, so a busy worker is restarted.
    """

    def __init__(self, most: int, spare: int) -> None:
        self._most = most
        self._spare = spare
        self._open: set[asyncio.Transport] = set()
        self._idle: dict[asyncio.Transport, None] = {}  # the longest idle one first

    def enter(self, connection: asyncio.Transport) -> bool:
        """A new one, which waits for its first request; False when there is no room for it."""
        if len(self._open) >= self._most + self._spare:
            if not self._idle:
                return False
            longest = next(iter(self._idle))
            self.leave(longest)
            longest.close()
        self._open.add(connection)
        self._idle[connection] = None
        return True

    def busy(self, connection: asyncio.Transport) -> bool:
        """False = more of them have an open request than may."""
        self._idle.pop(connection, None)
        return len(self._open) - len(self._idle) <= self._most

    def idle(self, connection: asyncio.Transport) -> None:
        if connection in self._open:
            self._idle[connection] = None

    def leave(self, connection: asyncio.Transport) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)


def _announced_bytes(scope: Scope) -> int | None:
    """Length of the body by its header; 0 for none, None when only its end shows it."""
    headers = Headers(scope=scope)
    if "transfer-encoding" in headers:
        return None
    return int(headers.get("content-length", 0))  # digits only: the parser has seen to that


class BodyReader:
    """Refuses a body that is coded (415), too large (413), too slow (408) or too much beside all
    others (503) as soon as that is known.  limit: returns the most bytes of one body, now.
    """

    def __init__(self, limit: Callable[[], int], limits: LimitsNow) -> None:
        self._limit = limit
        self._limits = limits
        self._num_held_bytes = 0

    @asynccontextmanager
    async def body(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """The body counts as held until the block ends.  Raises RequestError, ClientDisconnect."""
        coding = ", ".join(Headers(scope=scope).getlist("content-encoding"))
        if coding.strip().lower() not in ("", "identity"):
            message = (
                f"content-encoding: {shortened(coding, 40)} is not supported: send the body as it "
                "is, without this header"
            )
            raise RequestError(message, status=415, code="unsupported_content_encoding")
        announced, limit = _announced_bytes(scope), self._limit()
        if announced is not None and announced > limit:
            raise _too_large(limit)
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            async for chunk in self._chunks(receive, limit):
                chunks.append(chunk)
                num_bytes += len(chunk)
            content = b"".join(chunks)
            chunks.clear()
            yield content
        finally:
            self._num_held_bytes -= num_bytes

    async def _chunks(self, receive: Receive, limit: int) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        start, num_bytes, limits = clock(), 0, self._limits()
        most = max(limit, limits.max_bodies_bytes)
        more = True
        while more:
            try:
                async with asyncio.timeout_at(start + limits.body_deadline(num_bytes)):
                    message = await receive()
            except TimeoutError:
                text = (
                    f"the body did not come whole in {clock() - start:.0f} s: send it faster, or "
                    "less of it"
                )
                raise RequestError(text, status=_TOO_SLOW, code="body_timeout") from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk, more = message.get("body", b""), message.get("more_body", False)
            if (num_bytes := num_bytes + len(chunk)) > limit:
                raise _too_large(limit)
            if self._num_held_bytes + len(chunk) > most:
                text = (
                    "the bodies of open requests fill what this server keeps for them: retry later"
                )
                raise RequestError(text, status=503, code="bodies_full", retry_after_seconds=1)
            self._num_held_bytes += len(chunk)
            yield chunk


def _too_large(limit: int) -> RequestError:
    message = f"the body has more than {limit} bytes, the limit of this server: send less"
    return RequestError(message, status=413, code="body_too_large")


class EarlyResponse:
    """Pure ASGI: an answer that does not wait for the request's body ends the connection."""

    def __init__(self, app: ASGIApp, limits: LimitsNow) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _announced_bytes(scope) == 0:
            await self._app(scope, receive, send)
            return
        is_read = False  # the body, to its end
        lingers = True  # a client that was too slow sends nothing that we could wait for

        async def receive_noted() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body", False)
            return message

        async def send_before(message: Message) -> None:
            nonlocal lingers
            if is_read:
                await send(message)
            elif message["type"] == "http.response.start":
                lingers = message["status"] != _TOO_SLOW
                MutableHeaders(scope=message)["connection"] = "close"
                await send(message)
            elif message.get("more_body", False) or not lingers:
                await send(message)
            else:
                await send({**message, "more_body": True})
                if (answered := scope.get("state", {}).get(ANSWERED)) is not None:
                    answered()
                await self._drop(receive)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(scope, receive_noted, send_before)

    async def _drop(self, receive: Receive) -> None:
        limits = self._limits()
        remaining = limits.linger_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(limits.linger_seconds):
                while remaining > 0:
                    message = await receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
                    remaining -= len(message.get("body", b""))
