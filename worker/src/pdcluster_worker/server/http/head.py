"""Pure ASGI: HEAD wherever GET is served, with GET's status and headers and no body.

The application sees a GET, so a probe by HEAD says what one by GET does, and
needs a key where GET needs one.  That HEAD gets no body is the server's work,
which sees the request as it came.
"""

from starlette.types import ASGIApp, Receive, Scope, Send


class Head:
    """Middleware, the innermost one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer HEAD by what GET would say."""
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)
