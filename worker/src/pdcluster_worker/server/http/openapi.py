"""The OpenAPI document of an application's routes."""

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from pydantic import TypeAdapter
from starlette.routing import BaseRoute

from pdcluster_worker.server.http.routes import STREAM, ApiRoute

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
