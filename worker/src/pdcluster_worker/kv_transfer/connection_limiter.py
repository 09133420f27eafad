"""Bounds of the KV port: connections with and without a hello, and how long each may be silent."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

ConnectionT = TypeVar("ConnectionT")


@dataclass(frozen=True, slots=True)
class PortLimits:
    """Limits of a KV port."""

    hello_seconds: float = 5.0  # to introduce oneself, from the first byte to the last
    # Without a whole header, or within a frame without a byte; a sender that has nothing to write
    # leaves earlier (`tcp_link.LinkSettings.idle_seconds`).
    idle_seconds: float = 60.0
    ack_seconds: int = 30  # without room for an acknowledgement
    # With a hello, a thread each.  A pool has at most 1024 workers, with one connection of each
    # rank that writes here; twice that, because one of a pod that is gone may be held for
    # idle_seconds beside that of its replacement.
    max_connections: int = 2048
    # Of these from one address: one pod has one of each of its ranks, and all pods of a machine may
    # share its address (host network, address translation between machines).
    max_per_address: int = 512
    max_unauthenticated: int = 128  # without a hello, beyond these
    max_unauthenticated_per_address: int = 64  # of these from one address

    def within(self, num_files: int) -> "PortLimits":
        """These, for a process that may have so many connections in all; at least one peer."""
        return replace(
            self,
            max_connections=max(1, min(self.max_connections, num_files - self.max_unauthenticated)),
        )


class ConnectionLimiter(Generic[ConnectionT]):
    """Counts open connections.  close: ends one that was replaced."""

    def __init__(self, limits: PortLimits, close: Callable[[ConnectionT], None]) -> None:
        self._limits = limits
        self._close = close
        self._unauthenticated: dict[ConnectionT, str] = {}  # the longest silent one first
        self._peers: dict[ConnectionT, str] = {}
        self._unauthenticated_of: Counter[str] = Counter()
        self._peers_of: Counter[str] = Counter()

    def take(self, connection: ConnectionT, address: str) -> str | None:
        """Give a new connection of this address its place, or say why there is none."""
        limits = self._limits
        if self._unauthenticated_of[address] >= limits.max_unauthenticated_per_address:
            return (
                f"{limits.max_unauthenticated_per_address} without a hello are open from its "
                "address, the limit of one"
            )
        if len(self._unauthenticated) >= limits.max_unauthenticated:
            longest = next(iter(self._unauthenticated))
            self.leave(longest)
            self._close(longest)
        self._unauthenticated[connection] = address
        self._unauthenticated_of[address] += 1
        return None

    def authenticate(self, connection: ConnectionT) -> str | None:
        """Its hello was right: give it a peer's place, or say why there is none."""
        limits, address = self._limits, self._unauthenticated.get(connection)
        if address is None:
            return "its place was given to a new connection"
        if len(self._peers) >= limits.max_connections:
            return f"{limits.max_connections} are open, the limit"
        if self._peers_of[address] >= limits.max_per_address:
            return f"{limits.max_per_address} are open from its address, the limit of one"
        self.leave(connection)
        self._peers[connection] = address
        self._peers_of[address] += 1
        return None

    def leave(self, connection: ConnectionT) -> None:
        _remove(connection, self._unauthenticated, self._unauthenticated_of)
        _remove(connection, self._peers, self._peers_of)


def _remove(
    connection: ConnectionT,
    entries: dict[ConnectionT, str],
    by_address: Counter[str],
) -> None:
    address = entries.pop(connection, None)
    if address is None:
        return
    by_address[address] -= 1
    if not by_address[address]:
        del by_address[address]
