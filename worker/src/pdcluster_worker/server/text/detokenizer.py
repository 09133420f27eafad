"""Tokens of one choice to text, piece by piece; an incomplete UTF-8 sequence waits for its last
byte.
"""

import codecs
from dataclasses import dataclass, field

_Utf8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class Piece:
    """text: None where the bytes are not whole characters."""

    raw: bytes
    text: str | None = field(init=False)

    def __post_init__(self) -> None:
        try:
            text = self.raw.decode()
        except UnicodeDecodeError:
            text = None
        object.__setattr__(self, "text", text)


class Detokenizer:
    def __init__(self) -> None:
        self._utf8 = _Utf8(errors="replace")
        self._holds = False  # the beginning of a character

    def feed(self, piece: Piece) -> str:
        if piece.text is not None and not self._holds:
            return piece.text
        text = self._utf8.decode(piece.raw)
        self._holds = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)
