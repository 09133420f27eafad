"""Checksums over KV blocks, the same on both sides of a transfer.

A block is one contiguous run of bytes.  Each block has a CRC-32; a transfer's
checksum folds these, in order, into one 64-bit number.  The sender folds in
write order, the receiver in the order of `open`'s block list: these are one
order, because `transfer.inbox` accepts only the next blocks of that list.
"""

import zlib
from collections.abc import Iterable

CHECKSUM_START = 0xCBF29CE484222325
"""Checksum of no blocks: the offset basis of 64-bit FNV-1a, whose step also folds the CRCs."""

_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1


def block_crc(block: bytes | bytearray | memoryview) -> int:
    """CRC-32 of one block's bytes."""
    return zlib.crc32(block)


def extend_checksum(checksum: int, crcs: Iterable[int]) -> int:
    """Fold the CRCs of the next blocks into a transfer's checksum (64 bits, unsigned); order matters."""
    for crc in crcs:
        checksum = ((checksum ^ crc) * _PRIME) & _MASK
    return checksum
