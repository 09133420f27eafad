"""Pure ASGI: while the worker drains, every answer asks its client to close the connection.

A client's next request then comes on a new connection, which the Service sends
to a worker that stays.
"""

from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class DrainMiddleware:
    """Middleware.  draining: True while the worker drains."""

    def __init__(self, app: ASGIApp, draining: Callable[[], bool]) -> None:
        self._app = app
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the header; the server closes the connection after such an answer."""

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and self._draining():
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, send_last if scope["type"] == "http" else send)
