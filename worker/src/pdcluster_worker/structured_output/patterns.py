"""Patterns of JSON strings as xgrammar matches them: with the text between the quotes as it is
written.

A character that a string has by an escape alone is matched by that escape, so that
an answer parses whatever the pattern is.  A class of characters goes without those
that must be escaped, unless it has no others.
"""

import json
import re
import warnings
from functools import cache

_CLASS = r"\[\^?(?:\\.|[^\]\\])*\]"
_PIECE = re.compile(
    rf"{_CLASS}|\\x[0-9a-fA-F]{{2}}|\\u[0-9a-fA-F]{{4}}|\\u\{{[0-9a-fA-F]+\}}|\\c[A-Za-z]|\\.|.",
    re.DOTALL,
)
_MEANT = {
    r"\n": "\n",
    r"\r": "\r",
    r"\t": "\t",
    r"\f": "\f",
    r"\v": "\v",
    r"\0": "\0",
    r"\"": '"',
    r"\\": "\\",
}
_ESCAPED = '"\\' + "".join(map(chr, range(0x20)))
"""Characters that a JSON string has by an escape alone."""

_CODE = re.compile(r"\\c[A-Za-z]|\\u\{[0-9a-fA-F]+\}")
_NO_GROUP = re.compile(rf"{_CLASS}|\\.", re.DOTALL)
_AROUND = re.compile(r"\(\?<?[=!]")


def as_written(pattern: str) -> str:
    r"""The pattern of what is between the quotes.

    >>> print(as_written(r'^"\w+"\t[^"]["\\]$'))
    ^(?:\\")\w+(?:\\")(?:\\t)[^"](?:\\"|\\\\)$
    """
    return _PIECE.sub(lambda piece: _written(piece[0]), pattern)


def looks_around(pattern: str) -> bool:
    r"""Return whether a pattern has a lookahead or a lookbehind, which xgrammar passes over.

    >>> [looks_around(pattern) for pattern in ("^(a)(?!a)b$", r"(?:a)[(?=]\(?=")]
    [True, False]
    """
    return _AROUND.search(_NO_GROUP.sub("", pattern)) is not None


def _written(piece: str) -> str:
    if len(piece) > 1 and piece[0] == "[":
        return _class_as_written(piece)
    meant = _meant(piece)
    if len(meant) > 1 or meant not in _ESCAPED:
        return piece
    return _any_of(meant)


def _meant(piece: str) -> str:
    """The one character that a piece is for; the piece where it is for more."""
    if piece[:2] in (r"\x", r"\u") and len(piece) > 2:
        code = int(piece[2:].strip("{}"), 16)
        return chr(code) if code <= 0x10FFFF else piece
    if piece[:2] == r"\c" and len(piece) > 2:
        return chr(ord(piece[2]) % 32)
    return _MEANT.get(piece, piece)


def _any_of(characters: str) -> str:
    return f"(?:{'|'.join(re.escape(json.dumps(each)[1:-1]) for each in characters)})"


def _class_as_written(piece: str) -> str:
    if piece == "[^]":
        return "."
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            members = re.compile(_CODE.sub(_in_class, piece))
    except re.error:  # of another dialect
        return piece
    escaped = "".join(filter(members.match, _ESCAPED))
    has_plain = any(map(members.search, _plain_characters()))
    return piece if not escaped or has_plain else _any_of(escaped)


def _in_class(piece: re.Match[str]) -> str:
    """Escapes that Python writes otherwise, within a class."""
    meant = _meant(piece[0])
    return f"\\U{ord(meant):08x}" if len(meant) == 1 else piece[0]


@cache
def _plain_characters() -> tuple[str, ...]:
    """All that a string has as they are, in texts that take little memory to make."""
    blocks = [(0x20, 0xD800), (0xE000, 0x10000)]
    blocks += [(start, start + 0x10000) for start in range(0x10000, 0x110000, 0x10000)]
    texts = ("".join(map(chr, range(*block))) for block in blocks)
    return tuple(text.replace('"', "").replace("\\", "") for text in texts)
