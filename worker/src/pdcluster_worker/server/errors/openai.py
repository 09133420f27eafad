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

from pdcluster_schema.text import shortened
from pdcluster_worker.errors import RequestError
from pdcluster_worker.tracing.request_trace import add_event

_SHOULD = re.compile("^(Input|String|List) should")
_ITEMS = re.compile("^Value should(.*) item(s?) after validation, not .*")
_NOTED_CHARACTERS = 200
_NOT_AN_OBJECT = ("model_type", "model_attributes_type", "dict_type")
_SURROGATE = re.compile("[\ud800-\udfff]")
_REASONS = {400: "invalid_request", 404: "not_found", 413: "body_too_large", 429: "rate_limited"}
_NO_SPACE = ("queue_full", "bodies_full", "connections_full")
_REFUSALS = frozenset(
    {*_NO_SPACE, "draining", "not_ready", "no_prefill_worker", "no_decode_worker"}
)


Path = tuple[int | str, ...]
"""Names and places that lead to a field of a body."""


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
        add_event(
            "refused" if is_refusal(error) else "failed",
            reason=reason(error),
            message=shortened(error.message, _NOTED_CHARACTERS),
        )
        if is_refusal(error):
            rejected.labels(reason(error)).inc()
        return shaped(error, request.scope)

    def _on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _on_request_error(request, from_validation(error.errors(), error.body))

    def _on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return shaped(_from_http(request, error), request.scope, error.headers)

    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)


def from_validation(errors: Any, body: Any) -> RequestError:
    """The first of pydantic's errors about a body, in words that name the field."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return RequestError(
            f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][1]}"
        )
    path, message, num_more = _first_fault(errors, body)
    if not path:
        return RequestError(
            "the body must be a JSON object, sent with the header content-type: application/json"
        )
    param = shortened(_text(indexed(path)), 200)
    more = f" (and {num_more} more)" if num_more else ""
    return RequestError(f"{param}: {message}{more}", param=param)


def _first_fault(errors: Any, body: Any) -> tuple[Path, str, int]:
    """The place of the first fault and what is wrong there, and the number of others.

    A value that no member of a union takes has an error for each: those that come farthest into
    the value say what is wrong with it.
    """
    path, num_before = _field_path(errors[0], body)
    if num_before is None:
        return path, _words(errors[0]), len(errors) - 1
    start = errors[0]["loc"][:num_before]
    tried = [
        (_field_path(error, body)[0], error)
        for error in errors
        if error["loc"][:num_before] == start
    ]
    path = max((path for path, _ in tried), key=len)
    message = dict.fromkeys(_words(error) for place, error in tried if place == path)
    return path, " or ".join(message).replace(" or must be ", " or "), len(errors) - len(tried)


def _field_path(error: Any, body: Any) -> tuple[Path, int | None]:
    """The place of an error in the body, without the names of a union's members, and the number of
    parts of its `loc` before the first of them that pydantic made up; None = there is none.
    """
    path: list[int | str] = []
    num_before = None
    place = body
    parts = error["loc"]
    for number, part in enumerate(parts[1:], 1):
        is_missing = error["type"] == "missing" and number == len(parts) - 1
        if isinstance(part, int) or is_missing or (isinstance(place, dict) and part in place):
            path.append(part)
            place = _inner(place, part)
        elif not part.startswith("<") and num_before is None:
            num_before = number
    return tuple(path), num_before


def _inner(place: Any, part: int | str) -> Any:
    try:
        return place[part]
    except (LookupError, TypeError):
        return None


def _words(error: Any) -> str:
    if error["type"] in _NOT_AN_OBJECT:
        return "must be an object"
    message = error["msg"]
    if error["type"] in ("too_short", "too_long") and isinstance(error["input"], str):
        # A length that pydantic checks after a function of ours: it says items of anything.
        message = _ITEMS.sub(r"String should\1 character\2", message)
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


def indexed(path: Path) -> str:
    """A field's path as OpenAI writes it: messages[0].content."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path
    ).removeprefix(".")
