"""A tier that workers share: blocks under their hashes, in a store behind one port.

    entry    magic, format, fingerprint of everything that the bytes depend on, key, size, checksum
             of all of these and of the block; the block

An entry that is cut off, damaged or of another key or model is a miss and deleted.  A key begins
with the client's salt, so tenants never read one another's blocks.
"""

import hashlib
import logging
import struct
import zlib
from collections.abc import Sequence
from typing import Protocol

from pdcluster_worker.engine.tier_ports import TierFacts

logger = logging.getLogger(__name__)

FORMAT = 1
MOST_KNOWN = 1_000_000
"""Blocks of a store that an engine keeps in mind; it asks again for others."""

_MAGIC = b"PDC-KVS\0"
_ENTRY = struct.Struct("<8sI32s32sQI")  # magic, format, fingerprint, key, size, checksum
ENTRY_BYTES = _ENTRY.size


class Store(Protocol):
    """Entries by key, which other processes write and delete at any time.  Thread-safe.

    Each call raises OSError where the store does not answer soon, or takes no more.
    """

    identity: str
    """The same for all workers that share it, and no others."""

    def has(self, keys: Sequence[bytes]) -> int:
        """Keys before the first that it does not have."""

    def get(self, key: bytes, parts: Sequence[memoryview]) -> int:
        """Fill these in turn; returns the bytes that it had.  Raises KeyError where it has none."""

    def put(self, key: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """All of it or nothing is found from now on.  A no-op for a key that it has."""

    def delete(self, key: bytes) -> None:
        """Unknown: a no-op."""

    def close(self) -> None:
        """No thread uses it any more."""


def fingerprint_of(facts: bytes) -> bytes:
    """facts: all that the bytes of a block depend on, beside its tokens."""
    return hashlib.sha256(FORMAT.to_bytes(4, "little") + facts).digest()


class SharedTier:
    def __init__(
        self, name: str, store: Store, fingerprint: bytes, block_bytes: int, num_slots: int
    ) -> None:
        self.facts = TierFacts(name, min(num_slots, MOST_KNOWN), store=store.identity)
        self._store = store
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        logger.info("opened kv tier name=%s store=%s", name, store.identity)

    def has(self, keys: Sequence[bytes]) -> int:
        return self._store.has(keys)

    def write(self, slot: int, key: bytes, block: memoryview) -> None:
        self._store.put(key, [self._header(key, block), block])

    def read(self, slot: int, key: bytes, target: memoryview) -> bool:
        header = memoryview(bytearray(ENTRY_BYTES))
        num_read = self._store.get(key, [header, target])
        if num_read == ENTRY_BYTES + self._block_bytes and header == self._header(key, target):
            return True
        self._store.delete(key)
        return False

    def close(self) -> None:
        self._store.close()

    def _header(self, key: bytes, block: memoryview) -> bytes:
        facts = (_MAGIC, FORMAT, self._fingerprint, key, len(block))
        checksum = zlib.crc32(block, zlib.crc32(_ENTRY.pack(*facts, 0)))
        return _ENTRY.pack(*facts, checksum)
