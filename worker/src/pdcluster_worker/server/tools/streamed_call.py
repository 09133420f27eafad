"""Calls whose form the engine's constraint holds: arguments come in pieces."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from pdcluster_worker.server.text.events import (
    ArgumentsDelta,
    Part,
    TextDelta,
    ToolCallBegin,
    ToolCallEnd,
)
from pdcluster_worker.server.tools.calls import Call, Tools, object_of

NewId = Callable[[], str]


class Numbering:
    """Gives calls their numbers and ids, and lets no more than `most` through (None = any)."""

    def __init__(self, new_id: NewId, most: int | None = None) -> None:
        self._new_id = new_id
        self._most = most
        self._numbers = count()

    def begin(self, name: str) -> ToolCallBegin | None:
        number = next(self._numbers)
        is_let_through = self._most is None or number < self._most
        return ToolCallBegin(number, self._new_id(), name) if is_let_through else None

    def parts(self, calls: Iterable[Call]) -> Iterator[Part]:
        for call in calls:
            begin = self.begin(call.name)
            if begin is not None:
                yield begin
                yield ArgumentsDelta(begin.call, call.arguments)
                yield ToolCallEnd(begin.call)


class JsonDepth:
    """Follows one JSON object to its last brace."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end_in(self, text: str) -> int | None:
        """Characters of the text that are still the object's; None where it goes on."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return place + 1
        return None


@dataclass(frozen=True, slots=True)
class StreamedForm:
    """head: ends where the arguments begin; its group is the name as JSON.  tail: follows them."""

    head: re.Pattern[str]
    tail: re.Pattern[str]


class StreamedCall:
    """One call after its head.  begin: None = it is one too many, and is not given out."""

    def __init__(self, form: StreamedForm, begin: ToolCallBegin | None) -> None:
        self._form = form
        self._begin = begin
        self._depth: JsonDepth | None = JsonDepth()

    def take(self, text: str) -> tuple[Sequence[Part], str, bool]:
        parts: list[Part] = []
        if self._depth is not None:
            end = self._depth.end_in(text)
            piece, text = text[:end], "" if end is None else text[end:]
            if piece and self._begin is not None:
                parts.append(ArgumentsDelta(self._begin.call, piece))
            if end is None:
                return parts, "", False
            self._depth = None
        tail = self._form.tail.match(text)
        if tail is None:
            return parts, text, False
        if self._begin is not None:
            parts.append(ToolCallEnd(self._begin.call))
        return parts, text[tail.end() :], True


class BufferedCalls(ABC):
    """Holds text back until it is certain what it is.  _open: the call that is streamed."""

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self._text = ""
        self._open: StreamedCall | None = None

    def feed(self, text: str) -> Sequence[Part]:
        self._text += text
        parts: list[Part] = []
        while (found := self._next()) is not None:
            parts.extend(found)
        return parts

    @abstractmethod
    def _next(self) -> Sequence[Part] | None:
        """Parts that the held text is certain to be; None when more is needed."""

    def _begin(self, form: StreamedForm, tools: Tools) -> Sequence[Part] | None:
        """Open the call that the text begins with; None where its head is not whole, or is none."""
        head = form.head.match(self._text)
        if head is None:
            return None
        try:
            name = str(json.loads(head[1]))
        except ValueError:
            return None
        if name not in tools:
            return None
        self._text = self._text[head.end() :]
        begin = self._numbering.begin(name)
        self._open = StreamedCall(form, begin)
        return [] if begin is None else [begin]

    def _streamed(self, call: StreamedCall) -> Sequence[Part] | None:
        parts, self._text, is_over = call.take(self._text)
        if is_over:
            self._open = None
        return parts if parts or is_over else None


_FORM = StreamedForm(
    re.compile(r'\s*[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\{)'),
    re.compile(r"\s*\}"),
)
_END = re.compile(r"\s*\]\s*")


class RequiredCalls(BufferedCalls):
    """An array of calls of any of the tools."""

    def __init__(self, tools: Tools, numbering: Numbering) -> None:
        super().__init__(numbering)
        self._tools = tools

    def end(self) -> Sequence[Part]:
        """Show what is not the array's end, unless it is a call that was cut off."""
        rest, self._text = self._text, ""
        is_hidden = self._open is not None or _END.fullmatch(rest) or not rest.strip()
        return [] if is_hidden or rest.lstrip().startswith(("[", ",")) else [TextDelta(rest)]

    def _next(self) -> Sequence[Part] | None:
        if self._open is not None:
            return self._streamed(self._open)
        return self._begin(_FORM, self._tools)


class NamedCall:
    """The arguments of the one tool that the request names."""

    def __init__(self, name: str, numbering: Numbering) -> None:
        self._name = name
        self._numbering = numbering
        self._call: int | None = None
        self._pieces: list[str] = []

    def feed(self, text: str) -> Sequence[Part]:
        if not text:
            return []
        self._pieces.append(text)
        if self._call is not None:
            return [ArgumentsDelta(self._call, text)]
        begin = self._numbering.begin(self._name)
        assert begin is not None, "a named tool is called once"
        self._call = begin.call
        return [begin, ArgumentsDelta(begin.call, text)]

    def end(self) -> Sequence[Part]:
        if self._call is None or object_of("".join(self._pieces)) is None:
            return []
        return [ToolCallEnd(self._call)]
