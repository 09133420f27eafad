"""Finds the mark that ends a call: the first one that is no part of a value in the call."""

import re
from collections.abc import Callable
from typing import Protocol

_QUOTE = re.compile(r'\\.|"', re.DOTALL)


class Values(Protocol):
    """Follows the values of one call."""

    def is_open_after(self, piece: str) -> bool:
        """Take the text up to the next mark; return whether that stands within a value."""
        ...


NewValues = Callable[[], Values]


class JsonValues:
    def __init__(self) -> None:
        self._is_open = False

    def is_open_after(self, piece: str) -> bool:
        quotes = sum(found[0] == '"' for found in _QUOTE.finditer(piece))
        self._is_open ^= quotes % 2 == 1
        return self._is_open


class ParameterValues:
    def __init__(self) -> None:
        self._is_open = False

    def is_open_after(self, piece: str) -> bool:
        opened, closed = piece.rfind("<parameter="), piece.rfind("</parameter>")
        if opened != closed:  # -1 both where there is none
            self._is_open = opened > closed
        return self._is_open


class NoValues:
    """Nothing that may hold a mark."""

    def is_open_after(self, piece: str) -> bool:
        return False


class CloseMark:
    """The mark at the end of one call, in a text that grows."""

    def __init__(self, mark: str, values: Values) -> None:
        self.mark = mark
        self._values = values
        self._taken = 0  # characters that the values know
        self._next = 0  # place from which on a mark may stand

    def find(self, text: str) -> int | None:
        """The mark's place; None as long as there is none."""
        while (place := text.find(self.mark, self._next)) >= 0:
            is_value = self._values.is_open_after(text[self._taken : place])
            self._taken = place
            if not is_value:
                return place
            self._next = place + len(self.mark)
        self._next = max(self._next, len(text) - len(self.mark) + 1)
        return None
