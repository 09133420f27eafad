"""FastAPI's application with our layers around all of its own, and a short way from them to the
routes of generations.

FastAPI and Starlette have seven layers between an application and its route, which a request for
tokens goes through for nothing: what they would do for it, to answer the errors that the
application has handlers for, is done here.  Every other request takes their way.
"""

from collections.abc import Callable
from typing import cast

from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdcluster_worker.server.http.body_route import BodyRoute

Handler = Callable[[Request, Exception], Response]


class WorkerApp(FastAPI):
    """Layers are added by `add_middleware`, the innermost first."""

    def build_middleware_stack(self) -> ASGIApp:
        """FastAPI's own stack, then the short way, then our layers."""
        layers, self.user_middleware = self.user_middleware, []
        app: ASGIApp = _ShortWay(self, super().build_middleware_stack())
        self.user_middleware = layers
        for layer, args, kwargs in reversed(layers):
            app = layer(app, *args, **kwargs)
        return app


class _ShortWay:
    """The application inside of the layers.  whole: FastAPI's own stack."""

    def __init__(self, app: FastAPI, whole: ASGIApp) -> None:
        self._whole = whole
        self._handlers = app.exception_handlers
        self._routes = {
            (method, route.path): route
            for route in app.routes
            if isinstance(route, BodyRoute)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        route = self._routes.get((scope.get("method", ""), scope.get("path", "")))
        if route is None:
            await self._whole(scope, receive, send)
            return
        has_started = False

        async def send_noted(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await route.serve(scope, receive, send_noted)
        except Exception as e:
            handler = self._handler(e)
            if handler is None or has_started:
                raise
            await handler(Request(scope, receive, send), e)(scope, receive, send)

    def _handler(self, error: Exception) -> Handler | None:
        found = (self._handlers.get(kind) for kind in type(error).__mro__)
        return cast(Handler | None, next((handler for handler in found if handler), None))
