"""Formatters: the one sequence of deltas of a generation as the bytes of an API's answer."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from pydantic import BaseModel, Field
from starlette.responses import Response

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.text.events import (
    ArgumentsDelta,
    Delta,
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallEnd,
)

BlockKind = Literal["text", "reasoning", "call"]
Json = dict[str, Any]


@dataclass(slots=True, eq=False)
class Block:
    """pieces: its text, or a call's arguments as JSON text.  logprobs: of a text's tokens."""

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockEvent(NamedTuple):
    """ended: a block is whole, or as much as there will be of it.  text: by which it grew."""

    kind: Literal["started", "grew", "ended"]
    block: Block
    text: str = ""


class Blocks:
    """The parts of an answer as a list of blocks: text, reasoning or one call of a tool each.
    Space between blocks belongs to none; space before a text waits until more than space follows.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._space = ""  # that a text would begin with

    def feed(self, parts: Iterable[Part]) -> list[BlockEvent]:
        return [change for part in parts for change in self._take(part)]

    def end(self) -> list[BlockEvent]:
        changes = self._begin("text") if self._space and not self.blocks else []
        return [*changes, *self._close()]

    def _take(self, part: Part) -> list[BlockEvent]:
        match part:
            case TextDelta(text=text):
                return self._text(text)
            case ReasoningDelta(text=text):
                return [
                    *([] if self._is_in("reasoning") else self._begin("reasoning")),
                    *self._grow(text),
                ]
            case ToolCallBegin(call_id=call_id, name=name):
                return self._begin("call", call_id, name)
            case ArgumentsDelta(text=text):
                return self._grow(text)
            case ToolCallEnd():
                return self._close()

    def _text(self, text: str) -> list[BlockEvent]:
        if self._is_in("text"):
            return self._grow(text)
        self._space += text
        return self._begin("text") if text.strip() else []

    def _is_in(self, kind: BlockKind) -> bool:
        return self._open is not None and self._open.kind == kind

    def _begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> list[BlockEvent]:
        changes = self._close()
        space, self._space = self._space, ""
        self._open = Block(len(self.blocks), kind, call_id, name)
        self.blocks.append(self._open)
        changes.append(BlockEvent("started", self._open))
        return [*changes, *self._grow(space)] if kind == "text" else changes

    def _grow(self, text: str) -> list[BlockEvent]:
        assert self._open is not None, "a part belongs to a block that has begun"
        if not text:
            return []
        self._open.pieces.append(text)
        return [BlockEvent("grew", self._open, text)]

    def _close(self) -> list[BlockEvent]:
        block, self._open = self._open, None
        return [] if block is None else [BlockEvent("ended", block)]


DONE = b"data: [DONE]\n\n"
"""OpenAI's last event of a good end."""
MEDIA_TYPE = "text/event-stream; charset=utf-8"

to_json = msgspec.json.Encoder().encode


def event(body: Json) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"


def named_event(name: str, body: Json) -> bytes:
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
        self._lost: list[str] = []

    def of(self, delta: Delta) -> bytes | None:
        return self._events(self._take(delta))

    def whole(self, choices: list[list[Delta]], usage: Usage) -> bytes:
        (deltas,) = choices
        for delta in deltas:
            self._take(delta)
        self._blocks.end()
        return to_json(self._finished(usage))

    def _take(self, delta: Delta) -> list[BlockEvent]:
        self._last = delta
        self._lost += delta.degraded
        return self._blocks.feed(delta.parts)

    def _events(self, changes: list[BlockEvent]) -> bytes:
        return b"".join([self._change(change) for change in changes])

    @abstractmethod
    def _change(self, change: BlockEvent) -> bytes:
        """The events of one change of a block."""

    @abstractmethod
    def _finished(self, usage: Usage) -> Json:
        """The whole answer."""
