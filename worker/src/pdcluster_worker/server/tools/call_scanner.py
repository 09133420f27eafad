"""Splits an answer into text and calls: each is given out once it is whole and could be read."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdcluster_worker.server.text.events import Part, TextDelta, TrailingSpace, held_back
from pdcluster_worker.server.tools.calls import MAX_CALL_CHARACTERS, Reader, Tools
from pdcluster_worker.server.tools.streamed_call import BufferedCalls, Numbering, StreamedForm

_QUOTE = re.compile(r'\\.|"', re.DOTALL)


Values = Callable[[str, bool], bool]
"""The text up to a mark, and if a value was open before; returns if the mark is in a value."""


def json_values(piece: str, is_open: bool) -> bool:
    quotes = sum(found[0] == '"' for found in _QUOTE.finditer(piece))
    return is_open ^ (quotes % 2 == 1)


def parameter_values(piece: str, is_open: bool) -> bool:
    opened, closed = piece.rfind("<parameter="), piece.rfind("</parameter>")
    return is_open if opened == closed else opened > closed  # -1 both where there is none


def no_values(piece: str, is_open: bool) -> bool:
    return False


class CloseMark:
    """The mark at the end of one call, in a text that grows."""

    def __init__(self, mark: str, values: Values) -> None:
        self.mark = mark
        self._values = values
        self._is_open = False  # a value
        self._taken = 0  # characters before which `_is_open` counts
        self._next = 0  # place from which on a mark may stand

    def find(self, text: str) -> int | None:
        """The mark's place; None as long as there is none."""
        while (place := text.find(self.mark, self._next)) >= 0:
            self._is_open = self._values(text[self._taken : place], self._is_open)
            self._taken = place
            if not self._is_open:
                return place
            self._next = place + len(self.mark)
        self._next = max(self._next, len(text) - len(self.mark) + 1)
        return None


_PIECE_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class Marks:
    """Text before and after a call; close: "" = the next `open`, or the end of the answer."""

    open: str
    close: str = ""

    @property
    def ends_with(self) -> str:
        return self.close or self.open


class MarkedCalls(BufferedCalls):
    """marks: in this order where two begin at one place.  written: form of every call."""

    def __init__(
        self,
        marks: Sequence[Marks],
        read: Reader,
        tools: Tools,
        numbering: Numbering,
        *,
        values: Values = no_values,
        written: StreamedForm | None = None,
    ) -> None:
        super().__init__(numbering)
        self._marks = marks
        self._values = values
        self._read = read
        self._tools = tools
        # `_text` outside of a call: not given out yet; inside: all of it, after the opening mark
        self._inside: Marks | None = None
        self._close = CloseMark("", no_values)  # of the call that is open
        self._space = TrailingSpace()  # dropped if a call follows
        self._written = written

    def end(self) -> Sequence[Part]:
        parts: list[Part] = []
        while self._inside is not None and self._open is None:
            parts += self._ended(None)
        if self._open is None:
            rest, self._text = self._text, ""
            parts += self._shown(rest)
        space = self._space.rest()
        return [*parts, TextDelta(space)] if space else parts

    def _next(self) -> Sequence[Part] | None:
        if self._inside is None:
            return self._outside()
        if self._open is not None:
            found = self._streamed(self._open)
            if self._open is None:
                self._inside = None
            return found
        begun = None if self._written is None else self._begin(self._written, self._tools)
        if begun is not None:
            self._space = TrailingSpace(drops=True)  # right after a call
            return begun
        place = self._close.find(self._text)
        if place is None and len(self._text) <= MAX_CALL_CHARACTERS:
            return None
        return self._ended(place)

    def _ended(self, place: int | None) -> list[Part]:
        """If it is no call so, the first mark ends it although it seemed to stand in a value."""
        assert self._inside is not None, "a call is open"
        first = self._text.find(self._inside.ends_with)
        if first >= 0 and first != place and self._read(self._text[:place]) is None:
            self._values = no_values
            return self._fed_again(first)
        if place is None:
            body, self._text = self._text, ""
            return self._closed(body, "")
        body, close = self._text[:place], self._inside.close
        self._text = self._text[place + len(close) :]
        return self._closed(body, close)

    def _fed_again(self, place: int) -> list[Part]:
        """In pieces, for each step copies what is left of one."""
        text, self._text = self._text, self._text[:place]
        self._close = CloseMark(self._close.mark, no_values)
        places = range(place, len(text), _PIECE_CHARACTERS)
        return [
            part for start in places for part in self.feed(text[start : start + _PIECE_CHARACTERS])
        ]

    def _outside(self) -> list[Part] | None:
        places = [
            (place, number)
            for number, mark in enumerate(self._marks)
            if (place := self._text.find(mark.open)) >= 0
        ]
        if places:
            place, number = min(places)
            before, self._inside = self._text[:place], self._marks[number]
            self._text = self._text[place + len(self._inside.open) :]
            self._close = CloseMark(self._inside.ends_with, self._values)
            return self._shown(before)
        certain = len(self._text) - held_back(self._text, [mark.open for mark in self._marks])
        if not certain:
            return None
        text, self._text = self._text[:certain], self._text[certain:]
        return self._shown(text)

    def _closed(self, body: str, close: str) -> list[Part]:
        assert self._inside is not None, "a call is open"
        opened, self._inside = self._inside.open, None
        calls = self._read(body)
        if calls is None:
            return self._shown(opened + body + close)
        self._space = TrailingSpace(drops=True)  # right after a call
        return list(self._numbering.parts(calls))

    def _shown(self, text: str) -> list[Part]:
        shown = self._space.shown(text)
        return [TextDelta(shown)] if shown else []


class LeadingCalls:
    """leads: beginnings of an answer that is calls, after white space."""

    def __init__(self, leads: Sequence[str], read: Reader, numbering: Numbering) -> None:
        self._leads = leads
        self._read = read
        self._numbering = numbering
        self._text: str | None = ""  # None once it is text

    def feed(self, text: str) -> Sequence[Part]:
        if self._text is None:
            return [TextDelta(text)] if text else []
        self._text += text
        start = self._text.lstrip()
        may_lead = any(start.startswith(lead) or lead.startswith(start) for lead in self._leads)
        if may_lead and len(self._text) <= MAX_CALL_CHARACTERS:
            return []
        shown, self._text = self._text, None
        return [TextDelta(shown)]

    def end(self) -> Sequence[Part]:
        text, self._text = self._text, None
        if not text:
            return []
        calls = self._read(text)
        return [TextDelta(text)] if calls is None else list(self._numbering.parts(calls))
