"""Answers of OpenAI's chat and completions APIs: one JSON, or events up to [DONE]."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import error_response, openai_error
from pdcluster_worker.server.generation.formatter import DONE, Usage, event, to_json
from pdcluster_worker.server.openai.protocol import ServedExtension
from pdcluster_worker.server.openai.response_extras import ResponseExtras
from pdcluster_worker.server.schemas.requests import Generate
from pdcluster_worker.server.text.events import Delta, TextDelta

_MARK = "0"


class OpenAIFormatter(ABC):
    """A `Formatter`.

    chunk_kinds: types of chunks without usage, and with it.

    Most tokens add text and nothing else: the bytes around that text are those of the choice's
    first such event, so no body is built again.
    """

    chunk_kinds: tuple[type[BaseModel], type[BaseModel]]

    def __init__(self, response_id: str, request: Generate, extras: ResponseExtras) -> None:
        options = request.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._counts = bool(self._include_usage and options and options.continuous_usage_stats)
        self._so_far: Usage | None = None  # where every chunk shows it
        self._around: dict[int, tuple[bytes, bytes]] = {}  # by the choice's index
        self.extras = extras
        created = int(time.time())
        self.head: dict[str, Any] = {"id": response_id, "created": created, "model": request.model}

    @abstractmethod
    def chunk(self, delta: Delta, usage: Usage | None = None) -> BaseModel | None:
        """One event of a stream; None when the delta shows nothing.  usage: so far, to be shown."""

    @abstractmethod
    def reply(self, choices: list[list[Delta]], usage: Usage) -> BaseModel:
        """The whole answer; `choices` are in the order of their indices."""

    def shown_usage(self, usage: Usage) -> Usage:
        return usage

    def begin(self, usage: Usage) -> bytes:
        if self._counts:
            self._so_far = usage.with_completion(0)
        return b""

    def of(self, delta: Delta) -> bytes | None:
        if self._so_far is not None:
            self._so_far = self._so_far.with_completion(self._so_far.completion_tokens + 1)
        elif text := delta.plain_text:
            around = self._around.get(delta.index)
            if around is None:
                around = self._around[delta.index] = self._split(delta.index)
            return around[0] + to_json(text) + around[1]
        body = self.chunk(delta, self._so_far)
        return None if body is None else event(body)

    def end(self, usage: Usage) -> bytes:
        last = event(self.new_chunk([], usage)) if self._include_usage else b""
        return last + DONE

    def failed(self, error: RequestError) -> bytes:
        return event(openai_error(error))

    def whole(self, choices: list[list[Delta]], usage: Usage) -> bytes:
        self.extras.note([deltas[0] for deltas in choices])
        return self.reply(choices, self.shown_usage(usage)).model_dump_json().encode()

    def refused(self, error: RequestError) -> Response:
        return error_response(error, openai_error(error))

    def new_chunk(
        self,
        choices: Sequence[BaseModel],
        usage: Usage | None,
        part: ServedExtension | None = None,
        **more: Any,
    ) -> BaseModel:
        shown = {**self.head, "choices": choices, "pdcluster": part, **more}
        plain, with_usage = self.chunk_kinds
        if not self._include_usage:
            return plain(**shown)
        return with_usage(**shown, usage=None if usage is None else self.shown_usage(usage))

    def _split(self, index: int) -> tuple[bytes, bytes]:
        body = self.chunk(Delta(index, (TextDelta(_MARK),)))
        assert body is not None, "text shows"
        # What follows the text is written by us alone, so the last mark is the text's.
        before, _, after = event(body).rpartition(to_json(_MARK))
        return before, after
