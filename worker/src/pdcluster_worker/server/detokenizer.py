"""Tokens of one choice to text, piece by piece.

`Detokenizer` holds back an incomplete UTF-8 sequence until its last byte is
there; `flush` gives what never completed as U+FFFD.  The joined pieces equal
the decoding of all bytes at once.  Which bytes a token stands for is
`token_bytes`' business, stop strings are `stop_strings`'.
"""

import codecs

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """An incremental UTF-8 decoder; constant work per byte."""

    def __init__(self) -> None:
        self._utf8 = _Utf8(errors="replace")

    def feed(self, token: bytes) -> str:
        """Take the bytes of one token; returns the text that is complete now."""
        return self._utf8.decode(token)

    def flush(self) -> str:
        """No more tokens: returns the rest, U+FFFD for a sequence that was cut off."""
        return self._utf8.decode(b"", final=True)
