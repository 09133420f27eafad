"""Session affinity: the requests of one session go to one worker, by a rule that every ingress
computes alike.

Each worker's rank for a session is a hash of both (rendezvous hashing): no table,
and when a worker goes only its own sessions move.
"""

from collections.abc import Iterable
from hashlib import blake2b


def home_of(session: str, keys: Iterable[str]) -> str:
    """The worker of a session among these.  ValueError without any.

    >>> home_of("s", ["a", "b", "c"]) == home_of("s", ["c", "b", "a"])
    True
    """
    return max(keys, key=lambda key: (_rank(session, key), key))


def _rank(session: str, key: str) -> bytes:
    return blake2b(f"{len(session)}:{session}{key}".encode(), digest_size=8).digest()
