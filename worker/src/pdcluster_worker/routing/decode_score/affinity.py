"""Session affinity by rendezvous hashing: each ingress computes the same worker without a table."""

from collections.abc import Iterable
from hashlib import blake2b


def home_of(session: str, keys: Iterable[str]) -> str:
    """Raises ValueError without keys."""
    return max(keys, key=lambda key: (_rank(session, key), key))


def _rank(session: str, key: str) -> bytes:
    return blake2b(f"{len(session)}:{session}{key}".encode(), digest_size=8).digest()
