"""Chained hashes of full blocks of tokens, for the engine's prefix cache and the router's index."""

import hashlib
from array import array
from collections.abc import Iterable, Sequence

from pdcluster_worker.messages.requests import RequestSpec

ROOT = hashlib.sha256(b"pdcluster block chain").digest()
"""Parent of the first block's hash; a fixed value, so that every worker computes the same chain."""


def extend_hashes(
    hashes: list[bytes], tokens: Sequence[int], block_size: int, salt: bytes = b""
) -> None:
    """Append to `hashes` until every full block of `tokens` has one; 32 bytes each, chained.

    salt: chains of two salts never meet, so blocks are shared within one salt only; b"" = no salt.
    """
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else None
        hashes.append(next_hash(parent, tokens[start : start + block_size], salt))


def next_hash(
    parent: bytes | None,
    block: Sequence[int],
    salt: bytes = b"",
    images: Iterable[tuple[str, int]] = (),
) -> bytes:
    """parent: None = the block is the first of its chain.  images: hash of each that is in the
    block, and where it begins, from the block's start.
    """
    before = parent
    if before is None:
        before = hashlib.sha256(ROOT + salt).digest() if salt else ROOT
    seen = "".join(f"{digest}@{offset};" for digest, offset in images).encode()
    return hashlib.sha256(before + array("i", block).tobytes() + seen).digest()


def block_hashes(tokens: Sequence[int], block_size: int, salt: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_size, salt)
    return hashes


def request_hashes(spec: RequestSpec, block_size: int) -> list[bytes]:
    """Hash all known tokens.  Blocks with different images never have the same hash."""
    tokens, hashes = [*spec.prompt, *spec.output], list[bytes]()
    if not spec.images:
        return block_hashes(tokens, block_size, spec.cache_salt)
    images, first = spec.images, 0  # that may be in a block; they are in order and apart
    for start in range(0, len(tokens) - block_size + 1, block_size):
        end = start + block_size
        while first < len(images) and images[first].offset + images[first].length <= start:
            first += 1
        end_image = first
        while end_image < len(images) and images[end_image].offset < end:
            end_image += 1
        seen = [(image.digest, image.offset - start) for image in images[first:end_image]]
        parent = hashes[-1] if hashes else None
        hashes.append(next_hash(parent, tokens[start:end], spec.cache_salt, seen))
    return hashes
