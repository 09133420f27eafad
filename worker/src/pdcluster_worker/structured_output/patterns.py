"""Patterns of ECMAScript, as schemas hold them, for Rust's regular expressions."""

import re

_ESCAPE = re.compile(r"\\(u\{|0(?!\d)|c[A-Za-z]|.)", re.DOTALL)
_PIECE = re.compile(r"\[\^?(?:\\.|[^\]\\])*\]|\\c[A-Za-z]|\\u\{|\\.|\(\?<?[=!]|.", re.DOTALL)
_AROUND = re.compile(r"\(\?<?[=!]")


def looks_around(pattern: str) -> bool:
    """Return whether a pattern has a lookahead or lookbehind."""
    return any(_AROUND.match(piece[0]) for piece in _PIECE.finditer(pattern))


def of_rust(pattern: str) -> str:
    r"""A pattern of ECMAScript as Rust's regular expressions take it: without lookarounds, and
    with escapes of theirs.

    >>> of_rust(r"(?!a)\u{a}\cJ[^]")
    '\\x{a}\\x{a}(?s:.)'
    """
    pieces = [found[0] for found in _PIECE.finditer(pattern)]
    depth, made = 0, []
    for piece in pieces:
        if depth:
            depth += (piece[0] == "(") - (piece == ")")
        elif _AROUND.match(piece):
            depth = 1
        else:
            made.append("(?s:.)" if piece == "[^]" else _ESCAPE.sub(_escaped, piece))
    return "".join(made)


def _escaped(found: re.Match[str]) -> str:
    if found[1] == "u{":
        return r"\x{"
    if found[1] == "0":
        return r"\x00"
    return rf"\x{{{ord(found[1][1]) % 32:x}}}" if len(found[1]) == 2 else found[0]
