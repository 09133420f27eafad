"""Calls that the request forces, given out as they are written: an array of {"name", "parameters"}
for `tool_choice: required`, the arguments alone of a named tool.
"""

import re
from collections.abc import Sequence

from pdcluster_worker.server.text.events import ArgumentsDelta, Part, TextDelta, ToolCallEnd
from pdcluster_worker.server.tools.calls import Tools, object_of
from pdcluster_worker.server.tools.streamed_call import (
    BufferedCalls,
    Numbering,
    StreamedCall,
    StreamedForm,
)

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
        is_shown = (
            self._open is None
            and rest.strip()
            and _END.fullmatch(rest) is None
            and not _may_be_call(rest)
        )
        return [TextDelta(rest)] if is_shown else []

    def _next(self) -> Sequence[Part] | None:
        if self._open is not None:
            return self._streamed(self._open)
        head = _FORM.name_in(self._text, self._tools)
        if head is None:
            return None
        name, length = head
        self._text = self._text[length:]
        begin = self._numbering.begin(name)
        self._open = StreamedCall(_FORM, begin)
        return [] if begin is None else [begin]


def _may_be_call(text: str) -> bool:
    return text.lstrip().startswith(("[", ","))


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
        is_whole = self._call is not None and object_of("".join(self._pieces)) is not None
        return [ToolCallEnd(self._call)] if is_whole and self._call is not None else []
