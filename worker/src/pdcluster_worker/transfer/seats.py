"""Bounds of the KV port: connections in all and from one address, and how long each may be silent.

Pure.  A stranger that opens connections takes only its own address's seats, so
one pod cannot shut the port for the others.
"""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PortLimits:
    """What a KV port bears.

    hello_seconds:   to introduce oneself, from the first byte to the last.
    idle_seconds:    without a whole header, or within a frame without a byte; a sender that has
                     nothing to write leaves earlier (`tcp_link.LinkSettings.idle_seconds`).
    ack_seconds:     without room for an acknowledgement.
    max_connections: threads that peers can make us hold; a cell has at most about 128 workers,
                     each with one connection.
    max_per_address: of these from one address: one pod has one, several share an address where
                     they use the network of their machine.
    """

    hello_seconds: float = 5.0
    idle_seconds: float = 60.0
    ack_seconds: int = 30
    max_connections: int = 512
    max_per_address: int = 64


class Seats:
    """Counts open connections; the caller takes care of threads."""

    def __init__(self, limits: PortLimits) -> None:
        self._limits = limits
        self._taken: Counter[str] = Counter()

    def take(self, address: str) -> str | None:
        """Give a connection of this address its seat, or say why there is none."""
        if self._taken.total() >= self._limits.max_connections:
            return f"{self._limits.max_connections} are open, the limit"
        if self._taken[address] >= self._limits.max_per_address:
            return f"{self._limits.max_per_address} are open from its address, the limit of one"
        self._taken[address] += 1
        return None

    def leave(self, address: str) -> None:
        """Take a seat back."""
        self._taken[address] -= 1
        if not self._taken[address]:
            del self._taken[address]
