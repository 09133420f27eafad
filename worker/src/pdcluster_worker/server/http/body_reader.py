"""Reads the bodies of requests within bounds: a body that is coded (415), too large (413), too slow
(408) or too much beside all others (503) is refused as soon as that is known.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from pdcluster_schema.text import shortened
from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.http.early_response import announced_bytes
from pdcluster_worker.server.http.limits import LimitsNow


class BodyReader:
    """limit: returns the most bytes of one body, now."""

    def __init__(self, limit: Callable[[], int], limits: LimitsNow) -> None:
        self._limit = limit
        self._limits = limits
        self._num_held_bytes = 0

    @asynccontextmanager
    async def body(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """The body counts as held until the block ends.  Raises RequestError, ClientDisconnect."""
        if (coding := _coding(scope)) is not None:
            raise _coded(coding)
        announced, limit = announced_bytes(scope), self._limit()
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
                raise _too_slow(clock() - start) from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk, more = message.get("body", b""), message.get("more_body", False)
            if (num_bytes := num_bytes + len(chunk)) > limit:
                raise _too_large(limit)
            if self._num_held_bytes + len(chunk) > most:
                raise _too_many()
            self._num_held_bytes += len(chunk)
            yield chunk


def _coding(scope: Scope) -> str | None:
    coding = ", ".join(
        value.decode("latin-1") for name, value in scope["headers"] if name == b"content-encoding"
    )
    return None if coding.strip().lower() in ("", "identity") else coding


def _coded(coding: str) -> RequestError:
    message = (
        f"content-encoding: {shortened(coding, 40)} is not supported: send the body as it is, "
        "without this header"
    )
    return RequestError(message, status=415, code="unsupported_content_encoding")


def _too_large(limit: int) -> RequestError:
    message = f"the body has more than {limit} bytes, the limit of this server: send less"
    return RequestError(message, status=413, code="body_too_large")


def _too_many() -> RequestError:
    message = "the bodies of open requests fill what this server keeps for them: retry later"
    return RequestError(message, status=503, code="bodies_full", retry_after_seconds=1)


def _too_slow(seconds: float) -> RequestError:
    message = f"the body did not come whole in {seconds:.0f} s: send it faster, or less of it"
    return RequestError(message, status=408, code="body_timeout")
