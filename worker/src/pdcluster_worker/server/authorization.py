"""Pure ASGI: asks clients of the API for a key, where keys are asked for, before a byte of the body is read.

Only the API is closed: health, readiness, metrics and version stay open for
probes and scrapers.
"""

from collections.abc import Callable

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server import openai_errors, unread
from pdcluster_worker.server.limits import HttpLimits

_API = "/v1"
_SCHEME = "bearer"

AcceptsKey = Callable[[str], bool] | None
"""Whether a key is good, now; None = no key is asked for."""


class Authorization:
    """Middleware."""

    def __init__(
        self,
        app: ASGIApp,
        accepts: AcceptsKey,
        rejected: Counter,
        limits: HttpLimits,
    ) -> None:
        self._app = app
        self._accepts = accepts
        self._rejected = rejected
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer 401."""
        message = self._objection(scope)
        if message is None:
            await self._app(scope, receive, send)
            return
        error = RequestError(message, status=401, code="invalid_api_key")
        self._rejected.labels(openai_errors.reason(error)).inc()
        response = openai_errors.response(error, {"www-authenticate": "Bearer"})
        await unread.answer(response, scope, receive, send, self._limits)

    def _objection(self, scope: Scope) -> str | None:
        if self._accepts is None or scope["type"] != "http" or not is_api(scope["path"]):
            return None
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != _SCHEME or not key.strip():
            return "you did not provide an API key: send the header Authorization: Bearer KEY"
        return None if self._accepts(key.strip()) else "incorrect API key provided: ask whoever runs this service for one"


def is_api(path: str) -> bool:
    """Whether it is of the API, and not a probe's or a scraper's."""
    return path == _API or path.startswith(f"{_API}/")
