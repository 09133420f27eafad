"""Pure ASGI: lets browsers call the API from web pages of other origins (CORS, by the Fetch
standard).

A preflight is answered here, before a key is asked for, since a browser sends
none with it.  Errors carry the headers too, so that a page can read them.  An
origin that is not allowed is never echoed; its request is served as any other,
for it is the browser that keeps the answer from the page.
"""

from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdcluster_schema.text import quoted
from pdcluster_worker.config.http import ANY, CorsPolicy
from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import openai as openai_errors
from pdcluster_worker.server.http import early_response
from pdcluster_worker.server.http.limits import LimitsNow

EXPOSED = "x-request-id, retry-after, x-pdcluster-prefill, x-pdcluster-degraded, x-pdcluster-route"
"""Headers of answers that a page may read, in addition to the CORS-safelisted ones."""

_VARIES = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"


class Cors:
    """Middleware.  policy: returns the one in force now."""

    def __init__(
        self,
        app: ASGIApp,
        policy: Callable[[], CorsPolicy],
        limits: LimitsNow,
    ) -> None:
        self._app = app
        self._policy = policy
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight, or add to the answer what the policy allows its origin."""
        if scope["type"] != "http" or not (policy := self._policy()).allowed_origins:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        added = for_origin(policy, headers.get("origin"))
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            answer = preflight(policy, headers, added)
            await early_response.answer(answer, scope, receive, send, self._limits())
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered.add_vary_header("Origin")
                answered.update(added)
                if added:
                    answered["access-control-expose-headers"] = EXPOSED
            await send(message)

        await self._app(scope, receive, send_with_headers)


def for_origin(policy: CorsPolicy, origin: str | None) -> dict[str, str]:
    """Headers that let pages of an origin read an answer; empty for one that is not allowed.

    >>> for_origin(CorsPolicy(allowed_origins=["*"]), "https://a.example")
    {'access-control-allow-origin': '*'}
    >>> for_origin(CorsPolicy(allowed_origins=["https://a.example"]), "https://b.example")
    {}
    """
    if origin is None:
        return {}
    if ANY in policy.allowed_origins:
        return {"access-control-allow-origin": ANY}
    if origin not in policy.allowed_origins:
        return {}
    credentials = {"access-control-allow-credentials": "true"} if policy.allow_credentials else {}
    return {"access-control-allow-origin": origin, **credentials}


def preflight(policy: CorsPolicy, headers: Headers, added: dict[str, str]) -> Response:
    """204 with what is allowed, or 403 with the setting that does not allow it.

    added: by `for_origin`
    """
    requested = headers.get("access-control-request-headers", "")
    refusal = (
        _refusal(policy, headers, requested)
        if added
        else _not_allowed("origin", headers.get("origin", ""), "allowedOrigins")
    )
    if refusal is not None:
        return openai_errors.response(refusal, {**added, "vary": _VARIES})
    # By name also where all are: * would leave out authorization.
    names = requested if ANY in policy.allowed_headers else ", ".join(policy.allowed_headers)
    allowed = {
        **added,
        "access-control-allow-methods": ", ".join(policy.allowed_methods),
        "access-control-max-age": str(policy.max_age_seconds),
        "vary": _VARIES,
    }
    return Response(
        status_code=204,
        headers={**allowed, "access-control-allow-headers": names} if names else allowed,
    )


def _refusal(policy: CorsPolicy, headers: Headers, requested: str) -> RequestError | None:
    method = headers["access-control-request-method"]
    if method not in policy.allowed_methods:
        return _not_allowed("method", method, "allowedMethods")
    if ANY in policy.allowed_headers:
        return None
    known = {name.lower() for name in policy.allowed_headers}
    names = (name.strip() for name in requested.split(","))
    strange = next((name for name in names if name and name.lower() not in known), None)
    return None if strange is None else _not_allowed("header", strange, "allowedHeaders")


def _not_allowed(what: str, value: str, field: str) -> RequestError:
    message = (
        f"{what} {quoted(value)} is not allowed for pages of other origins: add it to "
        f"service.cors.{field} of the PDCluster"
    )
    return RequestError(message, status=403, code="cors_not_allowed")
