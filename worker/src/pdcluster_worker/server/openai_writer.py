"""Answers of OpenAI's chat and completions APIs as bytes: bodies by a `Shape`, framed as one JSON or as events up to [DONE]."""

from typing import Protocol

from fastapi import Response
from pydantic import BaseModel

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server import openai_errors, sse
from pdcluster_worker.server.events import Delta
from pdcluster_worker.server.replies import Usage
from pdcluster_worker.server.sse import Events


class Shape(Protocol):
    """The JSON of one API."""

    def chunk(self, delta: Delta) -> BaseModel | None:
        """One event of a stream; None when the delta shows nothing."""
        ...

    def usage_chunk(self, usage: Usage) -> BaseModel:
        """The event before [DONE] with include_usage."""
        ...

    def reply(self, choices: list[list[Delta]], usage: Usage) -> BaseModel:
        """The whole answer; `choices` are in the order of their indices."""
        ...


class OpenAIWriter:
    """See `generation_response.Writer`."""

    def __init__(self, shape: Shape, *, include_usage: bool) -> None:
        self._shape = shape
        self._include_usage = include_usage
        self._events = Events(shape.chunk)

    def begin(self, usage: Usage) -> bytes:
        """Nothing."""
        return b""

    def of(self, delta: Delta) -> bytes | None:
        """See `Writer`."""
        return self._events.of(delta)

    def end(self, usage: Usage) -> bytes:
        """See `Writer`."""
        return (sse.event(self._shape.usage_chunk(usage)) if self._include_usage else b"") + sse.DONE

    def failed(self, error: RequestError) -> bytes:
        """See `Writer`; no [DONE] follows."""
        return sse.event(openai_errors.reply(error))

    def whole(self, choices: list[list[Delta]], usage: Usage) -> bytes:
        """See `Writer`."""
        return self._shape.reply(choices, usage).model_dump_json().encode()

    def refused(self, error: RequestError) -> Response:
        """See `Writer`."""
        return openai_errors.response(error)
