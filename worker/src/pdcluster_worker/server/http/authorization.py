"""Pure ASGI: refuses requests for the API before a byte of the body is read, where the connection
limit is reached or a key is missing.  Probes and scrapers ask for neither.
"""

from collections.abc import Callable

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors.handlers import reason, response_for
from pdcluster_worker.server.http.limits import TOO_MANY_CONNECTIONS
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
"""Tenant of a key now, None for one that is not valid; None = no key is required."""


class Authorization:
    def __init__(self, app: ASGIApp, tenant_of: TenantOfKey, rejected: Counter) -> None:
        self._app = app
        self._tenant_of = tenant_of
        self._rejected = rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_api(scope["path"]):
            await self._app(scope, receive, send)
        elif TOO_MANY_CONNECTIONS in scope.get("state", ()):
            message = "this server has as many open requests as it takes: retry later"
            error = RequestError(
                message, status=503, code="connections_full", retry_after_seconds=1
            )
            await self._refuse(error, {"connection": "close"}, scope, receive, send)
        elif (problem := self._key_problem(scope)) is not None:
            error = RequestError(problem, status=401, code="invalid_api_key")
            await self._refuse(error, {"www-authenticate": "Bearer"}, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _key_problem(self, scope: Scope) -> str | None:
        if self._tenant_of is None:
            return None
        key = presented_key(scope)
        if key is None:
            return _NO_KEY
        tenant = self._tenant_of(key)
        if tenant is None:
            return _WRONG_KEY
        note_key(scope, key, tenant)
        return None

    async def _refuse(
        self,
        error: RequestError,
        headers: dict[str, str],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._rejected.labels(reason(error)).inc()
        await response_for(error, scope, headers)(scope, receive, send)


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
    return path == _API or path.startswith(f"{_API}/") or path in _MORE
