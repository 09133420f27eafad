"""Text of an answer that is held back until what follows says what it is: stop strings, white space
and marks.
"""

from collections.abc import Sequence


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


class StopStrings:
    """found: the stop string that ended the text.  include: keep it."""

    found: str | None = None

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """Returns what may be shown now, and True once a stop string ended the text."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        ends = [
            (place + len(stop), place, stop)
            for stop in self._stops
            if (place := text.find(stop)) >= 0
        ]
        if ends:
            end, place, self.found = min(ends)
            return text[: end if self._include else place], True
        shown = len(text) - held_back(text, self._stops)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held
