"""Errors as answers, in the shape of the API whose path was requested."""

import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Literal

from prometheus_client import Counter
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from pdcluster_schema.text import shortened
from pdcluster_worker.errors import ContextLengthError, RequestError
from pdcluster_worker.tracing.request_trace import add_event

CONTEXT = "pdcluster.context"
"""Key of the `RequestContext` in a request's scope."""

MESSAGES = "/v1/messages"
_NAMED_EVENTS = (MESSAGES, "/v1/responses")  # APIs whose errors in a stream are named events

_SURROGATE = re.compile("[\ud800-\udfff]")
_NOTED_CHARACTERS = 200
_REASONS = {400: "invalid_request", 404: "not_found", 413: "body_too_large", 429: "rate_limited"}
_NO_SPACE = ("queue_full", "bodies_full", "connections_full")
_REFUSALS = frozenset(
    {
        *_NO_SPACE,
        "draining",
        "not_ready",
        "no_prefill_worker",
        "no_decode_worker",
        "model_unavailable",
    }
)
_MESSAGES_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

Handler = Callable[[Request, Exception], Awaitable[Response]]


class Error(BaseModel):
    """param: the field at fault; code: a word for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """The body of every answer that is not a success."""

    error: Error


class ErrorDetail(BaseModel):
    """Type and message of an error."""

    type: str
    message: str


class MessagesError(BaseModel):
    """The body of every answer that is not a success."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    request_id: str


def openai_error(error: RequestError) -> ErrorReply:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return ErrorReply(
        error=Error(message=sendable(error.message), type=kind, param=error.param, code=error.code)
    )


ERROR_HEADER = "x-pdcluster-error"
"""Header of an error in Anthropic's shape, whose body has no code."""


def messages_error(error: RequestError, request_id: str) -> MessagesError:
    """In Anthropic's shape, of an error event too."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _MESSAGES_TYPES.get(error.status, other)
    text = _too_long(error) if isinstance(error, ContextLengthError) else error.message
    message = text.encode(errors="replace").decode()
    return MessagesError(error=ErrorDetail(type=kind, message=message), request_id=request_id)


def _too_long(error: ContextLengthError) -> str:
    if error.max_tokens is None:
        return f"prompt is too long: {error.num_prompt} tokens > {error.most - 1} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.num_prompt} + "
        f"{error.max_tokens} > {error.most}, decrease input length or `max_tokens` and try again"
    )


def sendable(text: str) -> str:
    return _SURROGATE.sub("\ufffd", text)


def is_messages(path: str) -> bool:
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def response_for(
    error: RequestError, scope: Scope, headers: Mapping[str, str] | None = None
) -> Response:
    if is_messages(scope["path"]):
        reply = messages_error(error, getattr(scope.get(CONTEXT), "request_id", ""))
        return error_response(error, reply, headers)
    return error_response(error, openai_error(error), headers)


def error_event(error: RequestError, scope: Scope) -> bytes:
    """The last event of an answer that broke off, in the shape of its API."""
    name = b"event: error\n" if scope["path"].startswith(_NAMED_EVENTS) else b""
    return name + b"data: " + bytes(response_for(error, scope).body) + b"\n\n"


def error_response(
    error: RequestError, reply: BaseModel, headers: Mapping[str, str] | None = None
) -> Response:
    """The whole answer, with Retry-After when the error has one."""
    retry = error.retry_after_seconds
    if isinstance(reply, MessagesError) and error.code:
        headers = {**(headers or {}), ERROR_HEADER: error.code}
    return Response(
        reply.model_dump_json(),
        error.status,
        {**(headers or {}), **({} if retry is None else {"retry-after": str(retry)})},
        "application/json",
    )


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
        path, status = request.url.path, error.status_code
        message = str(error.detail or HTTPStatus(status).phrase)
        if status == 404:
            message = (
                f"{request.method} {path}: there is no such path: /openapi.json lists those that "
                "are served"
            )
        elif status == 405:  # the first route of the path alone has answered
            headers["Allow"] = ", ".join(_methods(request))
            message = f"{request.method} is not allowed on {path}: use {headers['Allow']}"
        return response_for(RequestError(message, status=status), request.scope, headers)

    return {RequestError: on_request_error, HTTPException: on_http_error}


def _methods(request: Request) -> list[str]:
    """Methods of all routes of the path."""
    found: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found)
