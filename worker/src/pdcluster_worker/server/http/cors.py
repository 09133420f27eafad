"""Pure ASGI: Starlette's CORS under the policy in force now.  A preflight is answered before a key
is required, and errors carry the headers too, so that a page can read them.
"""

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pdcluster_schema.service import ANY, CorsSpec
from pdcluster_schema.text import quoted
from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import openai

EXPOSED = (
    "x-request-id",
    "retry-after",
    "x-pdcluster-prefill",
    "x-pdcluster-degraded",
    "x-pdcluster-route",
)
"""Headers of answers that a page may read, in addition to the CORS-safelisted ones."""


class Cors:
    """Middleware.  policy: returns the one in force now."""

    def __init__(self, app: ASGIApp, policy: Callable[[], CorsSpec]) -> None:
        self._app = app
        self._policy = policy
        self._current: _PolicyCors | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        policy = self._policy()
        if scope["type"] != "http" or not policy.allowed_origins:
            await self._app(scope, receive, send)
            return
        if self._current is None or self._current.policy != policy:
            self._current = _PolicyCors(self._app, policy)
        await self._current(scope, receive, send)


class _PolicyCors(CORSMiddleware):
    def __init__(self, app: ASGIApp, policy: CorsSpec) -> None:
        super().__init__(
            app,
            allow_origins=policy.allowed_origins,
            allow_methods=policy.allowed_methods,
            allow_headers=policy.allowed_headers,
            allow_credentials=policy.allow_credentials,
            expose_headers=EXPOSED,
            max_age=policy.max_age_seconds,
        )
        self.policy = policy

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        refusal = self._refusal(request_headers)
        if refusal is None:
            return response
        origin = request_headers["origin"]
        allowed = {"access-control-allow-origin": origin} if self.is_allowed_origin(origin) else {}
        return openai.response(refusal, {**allowed, "vary": response.headers["vary"]})

    def _refusal(self, headers: Headers) -> RequestError | None:
        origin, method = headers["origin"], headers["access-control-request-method"]
        if not self.is_allowed_origin(origin):
            return _not_allowed("origin", origin, "allowedOrigins")
        if method not in self.policy.allowed_methods:
            return _not_allowed("method", method, "allowedMethods")
        if ANY in self.policy.allowed_headers:
            return None
        requested = headers.get("access-control-request-headers", "").split(",")
        names = [name.strip() for name in requested if name.strip()]
        others = [name for name in names if name.lower() not in self.allow_headers]
        return _not_allowed("header", others[0], "allowedHeaders") if others else None


def _not_allowed(what: str, value: str, field: str) -> RequestError:
    message = (
        f"{what} {quoted(value)} is not allowed for pages of other origins: add it to "
        f"service.cors.{field} of the PDCluster"
    )
    return RequestError(message, status=403, code="cors_not_allowed")
