"""Pure ASGI: reads the request's body up to a limit, before the application sees the request.

A body over the limit is answered 413 whether or not its length was announced.
What is beyond the limit is read and dropped (up to a bound), for closing a
socket with unread data would reset the connection before the client has read
the answer.
"""

from collections.abc import Callable

from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server import openai_errors

_DROPPED_BYTES = 64 << 20


class BodyLimit:
    """Middleware.  limit: returns the most bytes of a body, now."""

    def __init__(self, app: ASGIApp, limit: Callable[[], int], rejected: Counter) -> None:
        self._app = app
        self._limit = limit
        self._rejected = rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the application its whole body in one message, or answer 413; a client that leaves meanwhile gets nothing."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit()
        body = await _read(receive, limit)
        if isinstance(body, bytes):
            await self._app(scope, _replay(body, receive), send)
        elif body is not None:
            error = RequestError(
                f"the body has more than {limit} bytes, the limit of this server: send less", status=413, code="body_too_large"
            )
            self._rejected.labels(openai_errors.reason(error)).inc()
            await openai_errors.response(error, {"connection": "close"})(scope, receive, send)


class _TooLarge:
    """The body is over the limit."""


async def _read(receive: Receive, limit: int) -> bytes | _TooLarge | None:
    """The body, or that it is too large, or None when the client left before its end."""
    chunks: list[bytes] = []
    size = 0
    while size <= limit + _DROPPED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        size += len(message.get("body", b""))
        if size <= limit:
            chunks.append(message.get("body", b""))
        else:
            chunks.clear()
        if not message.get("more_body", False):
            break
    return b"".join(chunks) if size <= limit else _TooLarge()


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body first, then whatever comes from the client: its leaving."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
