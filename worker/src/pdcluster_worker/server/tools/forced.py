"""Calls that the request forces, which the engine's constraint keeps well formed: given out as they
are written.

`tool_choice: required` is a JSON array of {"name": ..., "parameters": {...}};
a named tool is the JSON of its arguments alone.  Since every name and value is
certain as soon as it is there, arguments come in pieces.  A choice that ends
too early (by length, or by a stop string) leaves a call without its end.
"""

import json
import re
from collections.abc import Sequence

from pdcluster_worker.server.text.events import (
    ArgumentsDelta,
    Part,
    TextDelta,
    ToolCallBegin,
    ToolCallEnd,
)
from pdcluster_worker.server.tools.calls import Tools, object_of
from pdcluster_worker.server.tools.scanning import Numbering

_HEAD = re.compile(
    r'\s*[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\{)'
)
_TAIL = re.compile(r"\s*\}")
_END = re.compile(r"\s*\]\s*")


class JsonDepth:
    """Follows one JSON object to its last brace."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end_in(self, text: str) -> int | None:
        """The length of what of the text is still the object's; None where all of it is, and the
        object goes on.
        """
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


class RequiredCalls:
    """An array of calls of any of the tools."""

    def __init__(self, tools: Tools, numbering: Numbering) -> None:
        self._tools = tools
        self._numbering = numbering
        self._text = ""
        self._open: ToolCallBegin | None = None
        self._depth: JsonDepth | None = None  # of the arguments, while they come

    def feed(self, text: str) -> Sequence[Part]:
        """Take more text."""
        self._text += text
        parts: list[Part] = []
        while (found := self._next()) is not None:
            parts.extend(found)
        return parts

    def end(self) -> Sequence[Part]:
        """No more text: what is not the array's end is shown, unless it is a call
        that was cut off.
        """
        rest, self._text = self._text, ""
        is_shown = (
            self._open is None
            and rest.strip()
            and _END.fullmatch(rest) is None
            and not _may_be_call(rest)
        )
        return [TextDelta(rest)] if is_shown else []

    def _next(self) -> list[Part] | None:
        if self._depth is not None:
            return self._arguments(self._depth)
        if self._open is not None:
            return self._closed(self._open)
        head = _HEAD.match(self._text)
        name = _name_in(head[1]) if head is not None else None
        if head is None or name not in self._tools:
            return None
        self._text = self._text[head.end() :]
        self._open, self._depth = self._numbering.begin(str(name)), JsonDepth()
        return [] if self._open is None else [self._open]

    def _arguments(self, depth: JsonDepth) -> list[Part] | None:
        if not self._text or self._open is None:
            return None
        end = depth.end_in(self._text)
        piece, self._text = self._text[:end], "" if end is None else self._text[end:]
        if end is not None:
            self._depth = None
        return [ArgumentsDelta(self._open.call, piece)]

    def _closed(self, opened: ToolCallBegin) -> list[Part] | None:
        tail = _TAIL.match(self._text)
        if tail is None:
            return None
        self._text, self._open = self._text[tail.end() :], None
        return [ToolCallEnd(opened.call)]


def _name_in(text: str) -> str | None:
    try:
        return str(json.loads(text))
    except ValueError:
        return None


def _may_be_call(text: str) -> bool:
    """Return whether the text may begin a call of the array."""
    return text.lstrip().startswith(("[", ","))


class NamedCall:
    """The arguments of the one tool that the request names."""

    def __init__(self, name: str, numbering: Numbering) -> None:
        self._name = name
        self._numbering = numbering
        self._call: int | None = None
        self._pieces: list[str] = []

    def feed(self, text: str) -> Sequence[Part]:
        """Take more text."""
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
        """No more text."""
        is_whole = self._call is not None and object_of("".join(self._pieces)) is not None
        return [ToolCallEnd(self._call)] if is_whole and self._call is not None else []
