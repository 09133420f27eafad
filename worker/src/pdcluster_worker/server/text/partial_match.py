"""Text of an answer that is held back until what follows says what it is."""

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
