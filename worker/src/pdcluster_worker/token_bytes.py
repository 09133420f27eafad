"""The bytes of each token, by tokenizer.json's decoder: byte-level BPE or SentencePiece."""

import re
from collections.abc import Callable
from typing import Any

from pdcluster_worker.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def _byte_level_alphabet() -> dict[str, int]:
    """Printable Latin-1 stands for itself, other bytes for U+0100 on, in order (GPT-2's table)."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = (byte for byte in range(256) if byte not in printable)
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + n): byte for n, byte in enumerate(others)},
    }


_ALPHABET = _byte_level_alphabet()


def byte_level(token: str) -> bytes:
    """An added token with characters outside the alphabet stands for itself."""
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode()


def sentencepiece(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE, " ").encode()


def reader_for(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """decoder: that node of tokenizer.json.  Raises ModelError for an unsupported family."""
    parts = _parts(decoder)
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return byte_level
    if "Metaspace" in kinds or any(
        part.get("type") == "Replace" and part.get("content") == " " for part in parts
    ):
        return sentencepiece
    raise ModelError(
        f"tokenizer.json: decoder {sorted(map(str, kinds)) or 'none'} is not supported: it must be "
        "ByteLevel or SentencePiece's"
    )


def _parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]
