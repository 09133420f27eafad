"""Answers to errors, our RequestError and Starlette's 404 and 405, in the shape of the API whose
path was requested.  Anything else is a bug, which `request_context` answers.
"""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from prometheus_client import Counter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from pdcluster_schema.text import shortened
from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import anthropic, openai
from pdcluster_worker.tracing.request_trace import add_event

CONTEXT = "pdcluster.context"
"""Key of the `RequestContext` in a request's scope."""

_NOTED_CHARACTERS = 200
_REASONS = {400: "invalid_request", 404: "not_found", 413: "body_too_large", 429: "rate_limited"}
_NO_SPACE = ("queue_full", "bodies_full", "connections_full")
_REFUSALS = frozenset(
    {*_NO_SPACE, "draining", "not_ready", "no_prefill_worker", "no_decode_worker"}
)

Handler = Callable[[Request, Exception], Awaitable[Response]]


def response_for(
    error: RequestError, scope: Scope, headers: Mapping[str, str] | None = None
) -> Response:
    if anthropic.is_messages(scope["path"]):
        return anthropic.response(error, getattr(scope.get(CONTEXT), "request_id", ""), headers)
    return openai.response(error, headers)


def reason(error: RequestError) -> str:
    return error.code or _REASONS.get(error.status, "error")


def is_refusal(error: RequestError) -> bool:
    return error.status < 500 or error.code in _REFUSALS


def error_handlers(rejected: Counter) -> dict[type[Exception], Handler]:
    """Handlers for Starlette; refused requests are counted in `rejected` by reason."""

    async def on_request_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        add_event(
            "refused" if is_refusal(error) else "failed",
            reason=reason(error),
            message=shortened(error.message, _NOTED_CHARACTERS),
        )
        if is_refusal(error):
            rejected.labels(reason(error)).inc()
        return response_for(error, request.scope)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == 405:  # the first route of the path alone has answered
            headers["Allow"] = ", ".join(_methods(request))
        return response_for(_from_http(request, error, headers), request.scope, headers)

    return {RequestError: on_request_error, HTTPException: on_http_error}


def _methods(request: Request) -> list[str]:
    """Methods of all routes of the path."""
    found: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found)


def _from_http(request: Request, error: HTTPException, headers: Mapping[str, str]) -> RequestError:
    path, status = request.url.path, error.status_code
    if status == 404:
        message = (
            f"{request.method} {path}: there is no such path: /openapi.json lists those that are "
            "served"
        )
    elif status == 405:
        allowed = headers.get("Allow", "another method")
        message = f"{request.method} is not allowed on {path}: use {allowed}"
    else:
        message = str(error.detail or HTTPStatus(status).phrase)
    return RequestError(message, status=status)
