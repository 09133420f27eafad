"""Patterns of JSON strings as xgrammar matches them: with the text between the quotes as it is
written.

A character that a string has by an escape alone is matched by that escape, so that
an answer parses whatever the pattern is.  Classes of characters need nothing: what
must be escaped is in none of them there.
"""

import json
import re

_PLAIN = r'[^\x00-\x1f"\\]'
"""A character that a string has as it is."""

MOST_REPEATED = 128
"""Most repetitions of one character in a pattern; with more xgrammar takes 50 ms for a mask over a
vocabulary of 150,000.
"""

_PIECE = re.compile(r"\[(?:\\.|[^\]\\])*\]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL)
_MEANT = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\f": "\f", r"\v": "\v", r"\"": '"', r"\\": "\\"}


def of_length(least: int, most: int | None) -> str:
    """Pattern of strings with so many characters; None = any number.

    Each bound is at most MOST_REPEATED.

    Near the end of a string masks of xgrammar's own bounds take twenty times as long.

    >>> print(of_length(1, 20))
    ^[^\\x00-\\x1f"\\\\]{1,20}$
    """
    return f"^{_PLAIN}{{{least},{'' if most is None else most}}}$"


def as_written(pattern: str) -> str:
    r"""The pattern of what is between the quotes.

    >>> print(as_written(r'^"\w+"\t[^"]$'))
    ^(?:\\")\w+(?:\\")(?:\\t)[^"]$
    """
    return _PIECE.sub(lambda piece: _written(piece[0]), pattern)


def _written(piece: str) -> str:
    is_code = piece[:2] in (r"\x", r"\u") and len(piece) > 2
    meant = chr(int(piece[2:], 16)) if is_code else _MEANT.get(piece, piece)
    if len(meant) > 1 or (meant >= " " and meant not in '"\\'):
        return piece
    return f"(?:{re.escape(json.dumps(meant)[1:-1])})"


_COUNTED = re.compile(r'^(\w+ ::= \(\()\[\^\\"\\\\\\r\\n\](?=\)\)$)', re.MULTILINE)
"""Rule that xgrammar writes for a character of a string whose length it counts."""


def with_plain_characters(rules: str) -> str:
    r"""Rules of a grammar, as xgrammar writes them, whose strings of bounded length have no control
    character: JSON holds none.

    >>> print(with_plain_characters(r'characters ::= (([^\"\\\r\n]))'))
    characters ::= (([^\0-\x1f\"\\]))
    """
    return _COUNTED.sub(lambda found: found[1] + r"[^\0-\x1f\"\\]", rules)
