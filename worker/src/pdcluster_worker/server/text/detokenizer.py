"""Tokens of one choice to text, piece by piece.

`Detokenizer` holds back an incomplete UTF-8 sequence until its last byte is
there; `flush` gives what never completed as U+FFFD.  The joined pieces equal
the decoding of all bytes at once.  Which bytes a token stands for is
`token_bytes`' business, stop strings are `stop_strings`'.
"""

import codecs
from dataclasses import dataclass, field

_Utf8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class Piece:
    """Text or bytes of one token.  text: its bytes as text, None where they are not whole
    characters.
    """

    raw: bytes
    text: str | None = field(init=False)

    def __post_init__(self) -> None:
        try:
            text = self.raw.decode()
        except UnicodeDecodeError:
            text = None
        object.__setattr__(self, "text", text)


class Detokenizer:
    """An incremental UTF-8 decoder; constant work per byte, and none for a piece that is whole
    characters.
    """

    def __init__(self) -> None:
        self._utf8 = _Utf8(errors="replace")
        self._holds = False  # the beginning of a character

    def feed(self, piece: Piece) -> str:
        """Take one token; returns the text that is complete now."""
        if piece.text is not None and not self._holds:
            return piece.text
        text = self._utf8.decode(piece.raw)
        self._holds = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """No more tokens: returns the rest, U+FFFD for a sequence that was cut off."""
        return self._utf8.decode(b"", final=True)
