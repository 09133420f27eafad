"""A route with one JSON body: FastAPI's for its OpenAPI document, with a shorter way from the body
to the endpoint.

FastAPI's own way solves dependencies and opens a stack of contexts for them, of which
such a route has none; that was a twentieth of what a request costs a router.  And it reads and
checks a body in one go, which for a large one holds up all other requests.  What is refused, and in
which words, is the same.
"""

import email.message
import json
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.http import json_body
from pdcluster_worker.server.http.off_loop import off_loop

_MISSING = {"type": "missing", "loc": ("body",), "msg": "Field required"}


class BodyRoute(APIRoute):
    """Calls `endpoint(body, request)` with the body as its first parameter's type, and sends the
    Response that it returns.

    The endpoint has these two parameters and no other, and is a coroutine function.
    """

    def __init__(
        self, path: str, endpoint: Callable[..., Awaitable[Response]], **options: Any
    ) -> None:
        super().__init__(path, endpoint, **options)
        self._answer = endpoint
        self.app = self.serve

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for this route.  Raises what the endpoint raises, and for a body that
        it does not take RequestValidationError or HTTPException 400.
        """
        request = Request(scope, receive, send)
        content = await request.body()
        content_type = request.headers.get("content-type", "")
        body = await off_loop(len(content), self._checked, content, content_type)
        response = await self._answer(body, request)
        await response(scope, receive, send)

    def _checked(self, content: bytes, content_type: str) -> Any:
        """The body as the endpoint takes it.  Raises as `serve` does."""
        assert self.body_field is not None, "a route with a body has its field"
        value = _read(content, content_type)
        body, errors = self.body_field.validate(value, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=value)
        return body


def _read(content: bytes, content_type: str) -> Any:
    """The JSON value of a body; its bytes where it is not said to be JSON.

    Raises RequestValidationError for a body that is empty or no JSON, HTTPException 400 for
    JSON beyond the parser's limits, and RequestError for one of too many values.
    """
    if not content:
        raise RequestValidationError([_MISSING])
    if not _is_json(content_type):
        return content
    try:
        return json_body.parsed(content)
    except RequestError:
        raise
    except json.JSONDecodeError as e:
        error = {
            "type": "json_invalid",
            "loc": ("body", e.pos),
            "msg": "JSON decode error",
            "input": {},
            "ctx": {"error": e.msg},
        }
        raise RequestValidationError([error], body=e.doc) from e
    except Exception as e:  # nested too deeply, an overlong number, or not UTF-8
        raise HTTPException(400, "There was an error parsing the body") from e


def add_body_route(
    app: FastAPI,
    path: str,
    endpoint: Callable[..., Awaitable[Response]],
    responses: dict[int | str, dict[str, Any]],
) -> None:
    """Serve POST `path` by a BodyRoute.  responses: for the OpenAPI document, by status."""
    app.router.add_api_route(
        path, endpoint, methods=["POST"], responses=responses, route_class_override=BodyRoute
    )


@lru_cache(maxsize=64)
def _is_json(content_type: str) -> bool:
    """Return whether a media type is JSON's.

    >>> [_is_json(name) for name in ("application/json; charset=utf-8", "application/ld+json",
    ...     "text/plain", "")]
    [True, True, False, False]
    """
    message = email.message.Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (
        subtype == "json" or subtype.endswith("+json")
    )
