"""Pure ASGI: asks clients of the API for a key, where keys are asked for, before a byte of the body
is read.

Only the API is closed: health, readiness, metrics and version stay open for
probes and scrapers.
"""

from collections.abc import Callable

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import openai as openai_errors
from pdcluster_worker.server.errors import shapes as error_shapes
from pdcluster_worker.server.http import early_response
from pdcluster_worker.server.http.limits import LimitsNow
from pdcluster_worker.server.http.request_context import note_key

_API = "/v1"
_MORE = ("/tokenize", "/detokenize")
_SCHEME = "bearer"
_KEY_HEADER = "x-api-key"
"""Header in which clients of Anthropic's API send the key."""
_NO_KEY = (
    "you did not provide an API key: send the header Authorization: Bearer KEY, or x-api-key: KEY"
)
_WRONG_KEY = "incorrect API key provided: get one from the administrator of this service"

TenantOfKey = Callable[[str], str | None] | None
"""Tenant of a key now, None for one that is not valid; None = no key is asked for."""


class Authorization:
    """Middleware."""

    def __init__(
        self,
        app: ASGIApp,
        tenant_of: TenantOfKey,
        rejected: Counter,
        limits: LimitsNow,
    ) -> None:
        self._app = app
        self._tenant_of = tenant_of
        self._rejected = rejected
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer 401."""
        if self._tenant_of is None or scope["type"] != "http" or not is_api(scope["path"]):
            await self._app(scope, receive, send)
            return
        key = presented_key(scope)
        if key is not None and (tenant := self._tenant_of(key)) is not None:
            note_key(scope, key, tenant)
            await self._app(scope, receive, send)
            return
        message = _NO_KEY if key is None else _WRONG_KEY
        error = RequestError(message, status=401, code="invalid_api_key")
        self._rejected.labels(openai_errors.reason(error)).inc()
        response = error_shapes.response(error, scope, {"www-authenticate": "Bearer"})
        await early_response.answer(response, scope, receive, send, self._limits())


def presented_key(scope: Scope) -> str | None:
    """The key that the client sent; None = it sent none."""
    headers = Headers(scope=scope)
    return key_in(headers.get("authorization", ""), headers.get(_KEY_HEADER, ""))


def key_in(authorization: str, api_key: str) -> str | None:
    """The key in the values of these two headers, "" for one that did not come.

    >>> key_in("Bearer a", "b"), key_in("Basic a", "b"), key_in("", "")
    ('a', 'b', None)
    """
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == _SCHEME and key.strip():
        return key.strip()
    return api_key.strip() or None


def is_api(path: str) -> bool:
    """Return whether it is a path of the API, and not one of probes or scrapers."""
    return path == _API or path.startswith(f"{_API}/") or path in _MORE
