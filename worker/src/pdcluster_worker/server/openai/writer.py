"""Answers of OpenAI's chat and completions APIs as bytes: bodies by a `Shape`, framed as one JSON
or as events up to [DONE].
"""

from collections.abc import Callable
from typing import Protocol

from pydantic import BaseModel
from starlette.responses import Response

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import openai as openai_errors
from pdcluster_worker.server.generation.usage import Usage
from pdcluster_worker.server.http import sse
from pdcluster_worker.server.schemas.requests import StreamOptions
from pdcluster_worker.server.text.events import Delta, TextDelta


class Shape(Protocol):
    """The JSON of one API."""

    def chunk(self, delta: Delta, usage: Usage | None = None) -> BaseModel | None:
        """One event of a stream; None when the delta shows nothing.  usage: so far, to be shown."""
        ...

    def usage_chunk(self, usage: Usage) -> BaseModel:
        """The event before [DONE] with include_usage."""
        ...

    def reply(self, choices: list[list[Delta]], usage: Usage) -> BaseModel:
        """The whole answer; `choices` are in the order of their indices."""
        ...


class OpenAIWriter:
    """See `generation.response.Writer`."""

    def __init__(self, shape: Shape, options: StreamOptions | None) -> None:
        self._shape = shape
        self._include_usage = bool(options and options.include_usage)
        self._counts = bool(self._include_usage and options and options.continuous_usage_stats)
        self._so_far: Usage | None = None  # where every chunk shows it
        self._events = EventEncoder(shape.chunk)

    def begin(self, usage: Usage) -> bytes:
        """Nothing."""
        if self._counts:
            self._so_far = usage.with_completion(0)
        return b""

    def of(self, delta: Delta) -> bytes | None:
        """See `Writer`."""
        if self._so_far is None:
            return self._events.of(delta)
        self._so_far = self._so_far.with_completion(self._so_far.completion_tokens + 1)
        body = self._shape.chunk(delta, self._so_far)
        return None if body is None else sse.event(body)

    def end(self, usage: Usage) -> bytes:
        """See `Writer`."""
        return (
            sse.event(self._shape.usage_chunk(usage)) if self._include_usage else b""
        ) + sse.DONE

    def failed(self, error: RequestError) -> bytes:
        """See `Writer`; no [DONE] follows."""
        return sse.event(openai_errors.reply(error))

    def whole(self, choices: list[list[Delta]], usage: Usage) -> bytes:
        """See `Writer`."""
        return self._shape.reply(choices, usage).model_dump_json().encode()

    def refused(self, error: RequestError) -> Response:
        """See `Writer`."""
        return openai_errors.response(error)


_MARK = "0"


class EventEncoder:
    """The events of one answer.

    Most tokens add text and nothing else: the bytes around that text are those of
    the choice's first such event, so no body is built again.
    """

    def __init__(self, body_of: Callable[[Delta], BaseModel | None]) -> None:
        self._body_of = body_of
        self._around: dict[int, tuple[bytes, bytes]] = {}  # by the choice's index

    def of(self, delta: Delta) -> bytes | None:
        """The event of one delta; None when it shows nothing."""
        text = delta.plain_text
        if not text:
            body = self._body_of(delta)
            return None if body is None else sse.event(body)
        around = self._around.get(delta.index)
        if around is None:
            around = self._around[delta.index] = self._split(delta.index)
        return around[0] + sse.to_json(text) + around[1]

    def _split(self, index: int) -> tuple[bytes, bytes]:
        body = self._body_of(Delta(index, (TextDelta(_MARK),)))
        assert body is not None, "text shows"
        # What follows the text is written by us alone, so the last mark is the text's.
        before, _, after = sse.event(body).rpartition(sse.to_json(_MARK))
        return before, after
