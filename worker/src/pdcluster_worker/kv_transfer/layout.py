"""Checksums over KV blocks, the same on both sides of a transfer, however ranks share the heads."""

import zlib
from collections.abc import Iterable, Sequence

CHECKSUM_START = 0xCBF29CE484222325
"""The offset basis of 64-bit FNV-1a, whose step also folds the CRCs."""

_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1


def head_crcs(block: bytes | bytearray | memoryview, num_heads: int) -> tuple[int, ...]:
    """CRC-32 of each head's bytes in (a shard of) one block."""
    size = len(block) // num_heads
    return tuple(
        zlib.crc32(block[start : start + size]) for start in range(0, size * num_heads, size)
    )


class ShardChecksum:
    """The checksum of some heads, as blocks are added."""

    __slots__ = ("_folds",)

    def __init__(self, heads: range) -> None:
        self._folds = [_fold(CHECKSUM_START, head) for head in heads]

    def extend(self, blocks: Iterable[Sequence[int]]) -> None:
        """Add the CRCs of the next blocks (`head_crcs`); order matters."""
        for crcs in blocks:
            self._folds = [_fold(fold, crc) for fold, crc in zip(self._folds, crcs, strict=True)]

    @property
    def value(self) -> int:
        return sum(self._folds) & _MASK


def combined(slices: Iterable[int | None]) -> int | None:
    """The checksum of all shards together; None where one has none."""
    total = 0
    for checksum in slices:
        if checksum is None:
            return None
        total += checksum
    return total & _MASK


def _fold(checksum: int, value: int) -> int:
    return ((checksum ^ value) * _PRIME) & _MASK
