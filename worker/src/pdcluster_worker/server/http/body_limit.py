"""Pure ASGI: reads the request's body, within bounds, before the application sees the request.

A body that no route takes is not read: its answer goes out at once.  One that
is coded (415), too large (413), too slow (408) or too much beside all others
(503) is answered as soon as that is known, by its announced length where it has one.
"""

import asyncio
from collections.abc import Callable
from functools import cache

from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client import Counter
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdcluster_schema.text import shortened
from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import openai as openai_errors
from pdcluster_worker.server.errors import shapes as error_shapes
from pdcluster_worker.server.http import early_response
from pdcluster_worker.server.http.limits import LimitsNow
from pdcluster_worker.server.http.request_context import note_body


class BodyLimit:
    """Middleware.

    takes_body: whether a request goes to a route that reads a body
    limit:      returns the most bytes of one body, now
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        takes_body: Callable[[Scope], bool],
        limit: Callable[[], int],
        limits: LimitsNow,
        rejected: Counter,
    ) -> None:
        self._app = app
        self._takes_body = takes_body
        self._limit = limit
        self._limits = limits
        self._rejected = rejected
        self._num_held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the application its whole body in one message, or answer for it.

        A client that leaves meanwhile gets nothing.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = early_response.announced_bytes(scope)
        if announced == 0:
            await self._app(scope, receive, send)
        elif not self._takes_body(scope):
            await early_response.answer(self._app, scope, receive, send, self._limits())
        elif (coding := _coding(scope)) is not None:
            await self._refuse(_coded(coding), scope, receive, send)
        elif announced is not None and announced > (limit := self._limit()):
            await self._refuse(_too_large(limit), scope, receive, send)
        else:
            await self._with_body(scope, receive, send)

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, then run the application.

        The bytes count as held until the request has ended, or the body is refused.
        """
        body = _ReceivedBody()
        try:
            error = await self._read(body, receive)
            if error is None and body.is_whole:
                note_body(scope, body.num_bytes)
                await self._app(scope, _replay(body.join(), receive), send)
        finally:
            body.chunks.clear()
            self._num_held_bytes -= body.num_bytes
        if error is not None:
            await self._refuse(error, scope, receive, send)

    async def _read(self, body: "_ReceivedBody", receive: Receive) -> RequestError | None:
        """Fill `body` to its end, or until the client leaves; returns why not if it is refused."""
        clock = asyncio.get_running_loop().time
        start = clock()
        limit, limits = self._limit(), self._limits()
        most = max(limit, limits.max_bodies_bytes)
        try:
            async with asyncio.timeout_at(start + limits.body_deadline(0)) as deadline:
                while not body.is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunk = message.get("body", b"")
                    if body.num_bytes + len(chunk) > limit:
                        return _too_large(limit)
                    if self._num_held_bytes + len(chunk) > most:
                        return _too_many()
                    body.take(chunk, is_whole=not message.get("more_body", False))
                    self._num_held_bytes += len(chunk)
                    if not body.is_whole:
                        deadline.reschedule(start + limits.body_deadline(body.num_bytes))
        except TimeoutError:
            return _too_slow(clock() - start)
        return None

    async def _refuse(
        self,
        error: RequestError,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._rejected.labels(openai_errors.reason(error)).inc()
        response = error_shapes.response(error, scope, {"connection": "close"})
        if error.status == 408:  # it sends nothing that we could wait for
            await response(scope, receive, send)
        else:
            await early_response.answer(response, scope, receive, send, self._limits())


class _ReceivedBody:
    """Received part of one body."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.num_bytes = 0
        self.is_whole = False

    def take(self, chunk: bytes, is_whole: bool) -> None:
        self.chunks.append(chunk)
        self.num_bytes += len(chunk)
        self.is_whole = is_whole

    def join(self) -> bytes:
        """The whole of it; this object keeps none."""
        chunks, self.chunks = self.chunks, []
        return b"".join(chunks)


def taken_by(app: FastAPI) -> Callable[[Scope], bool]:
    """Decides if a request goes to a route that reads a body; routes may be added until the first
    request.
    """

    @cache
    def routes() -> tuple[frozenset[tuple[str, str]], list[APIRoute]]:
        routes_with_body = [
            route for route in app.routes if isinstance(route, APIRoute) and route.body_field
        ]
        return frozenset(
            (name, route.path) for route in routes_with_body for name in route.methods or ()
        ), routes_with_body

    def takes_body(scope: Scope) -> bool:
        named, routes_with_body = routes()
        return (scope["method"], scope["path"]) in named or any(
            route.matches(scope)[0] is Match.FULL for route in routes_with_body
        )

    return takes_body


def _coding(scope: Scope) -> str | None:
    """The coding of the body; None where it comes as it is."""
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


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body first, then whatever comes from the client: its leaving."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
