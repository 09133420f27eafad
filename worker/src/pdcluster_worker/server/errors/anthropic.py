"""Errors in Anthropic's shape: {"type": "error", "error": {type, message}, "request_id"}."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from pydantic import BaseModel
from starlette.responses import Response

from pdcluster_worker.errors import ContextLengthError, RequestError

PATH = "/v1/messages"


class ErrorDetail(BaseModel):
    """Type and message of an error."""

    type: str
    message: str


class MessagesError(BaseModel):
    """The body of every answer that is not a success."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    request_id: str


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_messages(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def body(error: RequestError, request_id: str) -> dict[str, Any]:
    """A `MessagesError`, which is an error event's body too."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    text = _too_long(error) if isinstance(error, ContextLengthError) else error.message
    message = text.encode(errors="replace").decode()
    return MessagesError(
        error=ErrorDetail(type=kind, message=message), request_id=request_id
    ).model_dump()


def _too_long(error: ContextLengthError) -> str:
    if error.max_tokens is None:
        return f"prompt is too long: {error.num_prompt} tokens > {error.most - 1} maximum"
    return (
        "input length and `max_tokens` exceed context limit: "
        f"{error.num_prompt} + {error.max_tokens} > {error.most}, "
        "decrease input length or `max_tokens` and try again"
    )


def response(
    error: RequestError, request_id: str, headers: Mapping[str, str] | None = None
) -> Response:
    """The whole answer, with Retry-After when the error has one."""
    retry = (
        {} if error.retry_after_seconds is None else {"retry-after": str(error.retry_after_seconds)}
    )
    return Response(
        msgspec.json.encode(body(error, request_id)),
        error.status,
        {**(headers or {}), **retry},
        "application/json",
    )
