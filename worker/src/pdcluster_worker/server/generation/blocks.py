"""The parts of an answer as a list of blocks: text, reasoning or one call of a tool each.  Space
between blocks belongs to none; space before a text waits until more than space follows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pdcluster_worker.server.text.events import (
    ArgumentsDelta,
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallEnd,
)

BlockKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True, eq=False)
class Block:
    """pieces: its text, or a call's arguments as JSON text."""

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockStarted:
    block: Block


@dataclass(frozen=True, slots=True)
class BlockGrew:
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnded:
    """A block is whole, or as much as there will be of it."""

    block: Block


Change = BlockStarted | BlockGrew | BlockEnded


class Blocks:
    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._space = ""  # that a text would begin with

    def feed(self, parts: Iterable[Part]) -> list[Change]:
        changes: list[Change] = []
        for part in parts:
            changes += self._take(part)
        return changes

    def end(self) -> list[Change]:
        changes = list(self._begin("text")) if self._space and not self.blocks else []
        return [*changes, *self._close()]

    def _take(self, part: Part) -> Sequence[Change]:
        match part:
            case TextDelta(text=text):
                return self._text(text)
            case ReasoningDelta(text=text):
                return [*self._opened("reasoning"), *self._grow(text)]
            case ToolCallBegin(call_id=call_id, name=name):
                return self._begin("call", call_id, name)
            case ArgumentsDelta(text=text):
                return self._grow(text)
            case ToolCallEnd():
                return self._close()

    def _text(self, text: str) -> Sequence[Change]:
        if self._open is not None and self._open.kind == "text":
            return self._grow(text)
        self._space += text
        return self._begin("text") if text.strip() else []

    def _opened(self, kind: BlockKind) -> Sequence[Change]:
        return [] if self._open is not None and self._open.kind == kind else self._begin(kind)

    def _begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> list[Change]:
        changes = self._close()
        space, self._space = self._space, ""
        self._open = Block(len(self.blocks), kind, call_id, name)
        self.blocks.append(self._open)
        changes.append(BlockStarted(self._open))
        return [*changes, *self._grow(space)] if kind == "text" else changes

    def _grow(self, text: str) -> list[Change]:
        assert self._open is not None, "a part belongs to a block that has begun"
        if not text:
            return []
        self._open.pieces.append(text)
        return [BlockGrew(self._open, text)]

    def _close(self) -> list[Change]:
        block, self._open = self._open, None
        return [] if block is None else [BlockEnded(block)]
