"""Errors in OpenAI's shape: {"error": {message, type, param, code}}."""

import re
from collections.abc import Mapping

from pydantic import BaseModel
from starlette.responses import Response

from pdcluster_worker.errors import RequestError

_SURROGATE = re.compile("[\ud800-\udfff]")


class Error(BaseModel):
    """param: the field at fault; code: a word for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """The body of every answer that is not a success."""

    error: Error


def reply(error: RequestError) -> ErrorReply:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return ErrorReply(
        error=Error(message=sendable(error.message), type=kind, param=error.param, code=error.code)
    )


def response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """The whole answer, with Retry-After when the error has one."""
    retry = (
        {} if error.retry_after_seconds is None else {"retry-after": str(error.retry_after_seconds)}
    )
    return Response(
        reply(error).model_dump_json(),
        error.status,
        {**(headers or {}), **retry},
        "application/json",
    )


def sendable(text: str) -> str:
    return _SURROGATE.sub("\ufffd", text)
