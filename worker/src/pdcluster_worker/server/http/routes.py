"""Routes of the API: Starlette's, with what the OpenAPI document says of their answers."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from pydantic import BaseModel, TypeAdapter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, get_name
from starlette.types import Receive, Scope, Send

from pdcluster_worker.server.errors.openai import ErrorReply
from pdcluster_worker.server.http.body_reader import BodyReader
from pdcluster_worker.server.http.json_body import checked
from pdcluster_worker.server.http.off_loop import off_loop
from pdcluster_worker.server.http.request_context import note_body

Answers = Mapping[int, type[BaseModel] | type[str] | None]
"""By status: the schema of a JSON body, str = plain text, None = any JSON."""

STREAM = "text/event-stream"


_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503)


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
        streams: bool = False,
    ) -> None:
        self.body = TypeAdapter(body)
        endpoint = _JsonEndpoint(self.body, handle, reader)
        super().__init__(path, endpoint, answers, method="POST", streams=streams)


class _JsonEndpoint:
    def __init__(
        self,
        adapter: TypeAdapter[Any],
        handle: Callable[[Any, Request], Awaitable[Response]],
        reader: BodyReader,
    ) -> None:
        self._adapter = adapter
        self._handle = handle
        self._reader = reader
        self.__name__ = handle.__name__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            async with self._reader.body(scope, receive) as content:
                note_body(scope, len(content))
                content_type = request.headers.get("content-type", "")
                body = await off_loop(len(content), checked, content, content_type, self._adapter)
                response = await self._handle(body, request)
                await response(scope, receive, send)
        except ClientDisconnect:
            return
