"""Patterns of JSON strings as xgrammar matches them: with the text between the quotes as it is
written.

A character that a string has by an escape alone is matched by that escape, so that
an answer parses whatever the pattern is.  Classes of characters need nothing: what
must be escaped is in none of them there.
"""

import json
import re

_PIECE = re.compile(r"\[(?:\\.|[^\]\\])*\]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL)
_MEANT = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\f": "\f", r"\v": "\v", r"\"": '"', r"\\": "\\"}


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
