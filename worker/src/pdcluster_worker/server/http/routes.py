"""Routes of the API: Starlette's, and the OpenAPI document that is made of them."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, TypeAdapter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, get_name
from starlette.types import Receive, Scope, Send

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import ErrorReply
from pdcluster_worker.server.http.json_body import checked, off_loop
from pdcluster_worker.server.http.limits import BodyReader
from pdcluster_worker.server.http.other_models import OpenRequest, OtherModels
from pdcluster_worker.server.http.request_context import note_body, note_ignored

Answers = Mapping[int, type[Any] | None]
"""By status: the type of a JSON body, for its schema; str = plain text, None = any JSON."""

STREAM = "text/event-stream"


_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503, 504)


def with_errors(success: type[BaseModel] | None, error: type[BaseModel] = ErrorReply) -> Answers:
    return {200: success, **dict.fromkeys(_ERRORS, error)}


class ApiRoute(Route):
    """A route of the document.  streams: a success may be a stream of events in place of JSON."""

    body: TypeAdapter[Any] | None = None

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        answers: Answers,
        *,
        method: str = "GET",
        streams: bool = False,
    ) -> None:
        name = get_name(endpoint.func if isinstance(endpoint, partial) else endpoint)
        super().__init__(path, endpoint, methods=[method], name=name)
        self.method = method
        self.answers = answers
        self.streams = streams


class JsonRoute(ApiRoute):
    """POST with a JSON body, which `handle` gets as an object of the type `body`."""

    def __init__(
        self,
        path: str,
        body: Any,
        handle: Callable[[Any, Request], Awaitable[Response]],
        answers: Answers,
        *,
        reader: BodyReader,
        others: OtherModels,
        streams: bool = False,
    ) -> None:
        super().__init__(path, handle, answers, method="POST", streams=streams)
        self.body = adapter = TypeAdapter(body)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive)
            content_type = request.headers.get("content-type", "")
            with suppress(ClientDisconnect):
                async with reader.body(scope, receive) as content:
                    note_body(scope, len(content))
                    opened = OpenRequest(content, scope, receive, send)
                    if (other := await others.named(opened)) is not None:
                        await others.answer(other, opened)
                        return
                    value, ignored = await off_loop(
                        len(content), checked, content, content_type, adapter
                    )
                    note_ignored(scope, ignored)
                    try:
                        response = await handle(value, request)
                        await others.run(response, value, opened)
                    except RequestError as e:
                        if not await others.answer_instead(e, value, opened):
                            raise

        self.app = answer


Json = dict[str, Any]

_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "description": "a chunk as JSON, or [DONE]"}},
}
_REF = "#/components/schemas/{model}"


def document(routes: Sequence[BaseRoute], title: str, version: str) -> Json:
    documented = [route for route in routes if isinstance(route, ApiRoute)]
    bodies = {route.path: route.body for route in documented if route.body is not None}
    models = {kind for route in documented for kind in route.answers.values()}
    schemas, definitions = TypeAdapter[Any].json_schemas(
        [
            *((path, "validation", body) for path, body in bodies.items()),
            *((kind, "serialization", TypeAdapter(kind)) for kind in models if kind is not None),
        ],
        ref_template=_REF,
    )
    by_key = {key: schema for (key, _), schema in schemas.items()}
    paths: dict[str, Json] = {}
    for route in documented:
        paths.setdefault(route.path_format, {})[route.method.lower()] = _operation(route, by_key)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }


def _operation(route: ApiRoute, schemas: dict[Any, Json]) -> Json:
    method = route.method.lower()
    operation: Json = {
        "summary": route.name.replace("_", " ").title(),
        "operationId": re.sub(r"\W", "_", f"{route.name}{route.path_format}_{method}"),
    }
    if route.param_convertors:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
    if route.body is not None:
        content = {"application/json": {"schema": schemas[route.path]}}
        operation["requestBody"] = {"content": content, "required": True}
    operation["responses"] = {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "content": _content(route, status, {} if kind is None else schemas[kind]),
        }
        for status, kind in route.answers.items()
    }
    return operation


def _content(route: ApiRoute, status: int, schema: Json) -> Json:
    media_type = "text/plain" if schema == {"type": "string"} else "application/json"
    stream = {STREAM: {"schema": _EVENT}} if route.streams and status == 200 else {}
    return {media_type: {"schema": schema}, **stream}
