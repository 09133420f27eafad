"""The events of an answer, which a parser makes of a choice's text, and each API formats."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from pdcluster_worker.messages.requests import Token

AnswerReason = Literal["stop", "length", "tool_calls"]
"""tool_calls: the model ended it by itself, after calls of its own choice."""


class TextDelta(msgspec.Struct, frozen=True):
    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of what the model wrote before its answer, without the tags around it."""

    text: str


class ToolCallBegin(msgspec.Struct, frozen=True):
    """A call of a tool.  call: its number in the choice, from 0; call_id: unique in the answer."""

    call: int
    call_id: str
    name: str


class ArgumentsDelta(msgspec.Struct, frozen=True):
    """All pieces together are one JSON object, unless the choice ended by length."""

    call: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    call: int


Part = TextDelta | ReasoningDelta | ToolCallBegin | ArgumentsDelta | ToolCallEnd


class CallParser(Protocol):
    """The joined parts are the same, however the text is cut."""

    def feed(self, text: str) -> Sequence[Part]:
        """Take more text; returns what is certain now."""
        ...

    def end(self) -> Sequence[Part]:
        """No more text: returns what was held back."""
        ...


class AnswerParser(CallParser, Protocol):
    """markers: control tokens that it must see."""

    markers: frozenset[str]

    @property
    def is_reasoning(self) -> bool:
        """True if the text that comes next is reasoning, as far as is known."""
        ...


class PlainText:
    markers: frozenset[str] = frozenset()
    is_reasoning = False

    def feed(self, text: str) -> Sequence[Part]:
        return (TextDelta(text),) if text else ()

    def end(self) -> Sequence[Part]:
        return ()


NewParser = Callable[[], AnswerParser]
"""Makes the parser of one choice."""


class Delta(msgspec.Struct, frozen=True):
    """Addition of one token to one choice; index: over all prompts.

    scored: the token and its offset in the text, for log probabilities.  degraded: on the first.
    made: the token itself, where the answer says more of tokens.
    """

    index: int
    parts: tuple[Part, ...] = ()
    scored: tuple[tuple[Token, int], ...] = ()
    is_first: bool = False
    finish_reason: AnswerReason | None = None
    degraded: tuple[str, ...] = ()
    made: tuple[Token, ...] = ()
    stop_string: str | None = None

    @property
    def text(self) -> str:
        return "".join([part.text for part in self.parts if isinstance(part, TextDelta)])

    @property
    def plain_text(self) -> str:
        """The text of a delta that is text and nothing else; "" of any other."""
        if len(self.parts) != 1 or self.is_first or self.scored or self.finish_reason or self.made:
            return ""
        part = self.parts[0]
        return part.text if isinstance(part, TextDelta) else ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; arguments: JSON text, cut off where the choice ended by length."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: AnswerReason


def assembled(deltas: Sequence[Delta]) -> WholeAnswer:
    """Answer that the deltas of one finished choice add up to."""
    reason = deltas[-1].finish_reason
    assert reason is not None, "a generation yields until every choice has ended"
    texts, thoughts = list[str](), list[str]()
    calls: dict[int, tuple[ToolCallBegin, list[str]]] = {}
    for part in (part for delta in deltas for part in delta.parts):
        match part:
            case TextDelta():
                texts.append(part.text)
            case ReasoningDelta():
                thoughts.append(part.text)
            case ToolCallBegin():
                calls[part.call] = (part, [])
            case ArgumentsDelta():
                calls[part.call][1].append(part.text)
    made = (ToolCall(begin.call_id, begin.name, "".join(text)) for begin, text in calls.values())
    return WholeAnswer("".join(texts), "".join(thoughts), tuple(made), reason)


class TrailingSpace:
    """White space at the end waits for more text.  drops: that at the beginning is dropped."""

    def __init__(self, *, drops: bool = False) -> None:
        self.drops = drops
        self._space = ""

    def shown(self, text: str) -> str:
        """The text with the space that waited for it, without that at its end; "" = all waits."""
        if self.drops:
            text = text.lstrip()
        shown = text.rstrip()
        if not shown:
            self._space += text
            return ""
        before, self._space = self._space, text[len(shown) :]
        self.drops = False
        return before + shown

    def rest(self) -> str:
        """The white space that waits, once nothing follows; it waits no more."""
        space, self._space = self._space, ""
        return space


def held_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that a mark may begin with.

    >>> held_back("so <tool", ["<tool_call>"])
    5
    """
    longest = max(map(len, marks), default=0) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)
