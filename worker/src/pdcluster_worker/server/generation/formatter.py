"""Formatters: the one sequence of deltas of a generation as the bytes of an API's answer."""

from abc import ABC, abstractmethod
from typing import Annotated, Any, Protocol

import msgspec
from pydantic import BaseModel, Field
from starlette.responses import Response

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.generation.blocks import Blocks, Change
from pdcluster_worker.server.text.events import Delta

DONE = b"data: [DONE]\n\n"
"""OpenAI's last event of a good end."""
MEDIA_TYPE = "text/event-stream; charset=utf-8"

to_json = msgspec.json.Encoder().encode


def event(body: BaseModel) -> bytes:
    return b"data: " + body.model_dump_json().encode() + b"\n\n"


def named_event(name: str, body: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + to_json(body) + b"\n\n"


class PromptTokensDetails(BaseModel):
    """cached_tokens: prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """reasoning_tokens: of the completion, those before the answer itself."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Tokens of the whole request; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Annotated[
        CompletionTokensDetails | None, Field(exclude_if=lambda value: value is None)
    ] = None

    def with_completion(self, num_tokens: int) -> "Usage":
        """The same prompt with so many tokens of an answer, of any kind."""
        return self.model_copy(
            update={
                "completion_tokens": num_tokens,
                "total_tokens": self.prompt_tokens + num_tokens,
                "completion_tokens_details": None,
            }
        )


class Formatter(Protocol):
    """The bytes of one API's answer to one request."""

    def begin(self, usage: Usage) -> bytes:
        """Events before the first delta's; usage: of the prompt, known with its first token."""
        ...

    def of(self, delta: Delta) -> bytes | None:
        """The events of one delta; None when it shows nothing."""
        ...

    def end(self, usage: Usage) -> bytes:
        """The last events of a good end."""
        ...

    def failed(self, error: RequestError) -> bytes:
        """The event of a failure after the first one."""
        ...

    def whole(self, choices: list[list[Delta]], usage: Usage) -> bytes:
        """The whole answer as JSON; `choices` are in the order of their indices."""
        ...

    def refused(self, error: RequestError) -> Response:
        """The answer in place of the whole one."""
        ...


class BlockFormatter(ABC):
    """Base of formatters of APIs whose answers are lists of blocks, of one choice."""

    def __init__(self) -> None:
        self._blocks = Blocks()
        self._last: Delta | None = None

    def of(self, delta: Delta) -> bytes | None:
        return self._events(self._take(delta))

    def whole(self, choices: list[list[Delta]], usage: Usage) -> bytes:
        (deltas,) = choices
        for delta in deltas:
            self._take(delta)
        self._blocks.end()
        return to_json(self._finished(usage))

    def _take(self, delta: Delta) -> list[Change]:
        self._last = delta
        return self._blocks.feed(delta.parts)

    def _events(self, changes: list[Change]) -> bytes:
        return b"".join([self._change(change) for change in changes])

    @abstractmethod
    def _change(self, change: Change) -> bytes:
        """The events of one change of a block."""

    @abstractmethod
    def _finished(self, usage: Usage) -> dict[str, Any]:
        """The whole answer."""
