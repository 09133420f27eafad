"""Errors to answers in OpenAI's shape: {"error": {message, type, param, code}}.

Covers our RequestError, FastAPI's validation errors (the first one, with the
field's path) and Starlette's 404 and 405.  Anything else is a bug, which
`request_context` logs and answers.
"""

import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import Counter
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from pdcluster_worker.errors import RequestError
from pdcluster_worker.journeys.journey import note
from pdcluster_worker.texts import cut

_SHOULD = re.compile("^(Input|String|List) should")
_NOTED_CHARACTERS = 200
_NOT_AN_OBJECT = ("model_type", "model_attributes_type", "dict_type")
_SURROGATE = re.compile("[\ud800-\udfff]")
_REASONS = {400: "invalid_request", 404: "not_found", 413: "body_too_large", 429: "rate_limited"}
_NO_ROOM = ("queue_full", "bodies_full", "connections_full")
_REFUSALS = frozenset({*_NO_ROOM, "draining", "not_ready", "no_prefill_worker", "no_decode_worker"})


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
    """The body for an error."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return ErrorReply(
        error=Error(message=_text(error.message), type=kind, param=error.param, code=error.code)
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


def reason(error: RequestError) -> str:
    """The label of `request_rejected`: the error's code, else a word for its status."""
    return error.code or _REASONS.get(error.status, "error")


def is_refusal(error: RequestError) -> bool:
    """Return whether the error refuses a request before any work.

    That is the client's fault, or a 503 of `_REFUSALS`; other 5xx are failures of work.
    """
    return error.status < 500 or error.code in _REFUSALS


def install(app: FastAPI, rejected: Counter, shaped: Callable[..., Response]) -> None:
    """Answer every expected exception of `app` as `shaped` has it; refused requests are counted in
    `rejected` by reason.

    shaped: makes the answer from an error, the request's scope and headers, see
            `error_shapes.response`.
    """

    def _on_request_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        note(
            "refused" if is_refusal(error) else "failed",
            reason=reason(error),
            message=cut(error.message, _NOTED_CHARACTERS),
        )
        if is_refusal(error):
            rejected.labels(reason(error)).inc()
        return shaped(error, request.scope)

    def _on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _on_request_error(request, from_validation(error.errors()))

    def _on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return shaped(_from_http(request, error), request.scope, error.headers)

    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)


def from_validation(errors: Any) -> RequestError:
    """The first of pydantic's errors, in words that name the field."""
    first = errors[0]
    # Without "body", and without the names of a union's members.
    path = tuple(part for part in first["loc"][1:] if not str(part).startswith("<"))
    if first["type"] == "json_invalid":
        return RequestError(
            f"the body is not valid JSON: {first['ctx']['error']} at character {path[0]}"
        )
    if not path:
        return RequestError(
            "the body must be a JSON object, sent with the header content-type: application/json"
        )
    param = cut(_text(indexed(path)), 200)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    words = "must be an object" if first["type"] in _NOT_AN_OBJECT else _words(first["msg"])
    return RequestError(f"{param}: {words}{more}", param=param)


def _words(message: str) -> str:
    return (
        _SHOULD.sub("must", message)
        .replace("Field required", "is required")
        .replace(" after validation", "")
    )


def _from_http(request: Request, error: HTTPException) -> RequestError:
    if error.status_code == 404:
        message = (
            f"{request.method} {request.url.path}: there is no such path: /openapi.json lists "
            "those that are served"
        )
    elif error.status_code == 405:
        message = (
            f"{request.method} is not allowed on {request.url.path}: use "
            f"{(error.headers or {}).get('Allow', 'another method')}"
        )
    elif error.status_code == 400:
        # FastAPI answers so when the JSON parser itself gave up: nesting or a number beyond its
        # limits, not UTF-8.
        message = (
            "the body is not JSON that can be read: it is nested too deeply, has an overlong "
            "number or is not UTF-8"
        )
    else:
        message = str(error.detail or HTTPStatus(error.status_code).phrase)
    return RequestError(message, status=error.status_code)


def _text(text: str) -> str:
    """Text that UTF-8 can carry: a client's lone surrogates come back as U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)


def indexed(path: tuple[int | str, ...]) -> str:
    """A field's path as OpenAI writes it: messages[0].content."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path
    ).removeprefix(".")
