"""Bound of the connections that the HTTP server has at once.

A new connection takes the place of the one that has waited longest for a request, so idle clients
cannot exhaust the limit.  Some spare places are for probes: uvicorn's `limit_concurrency` answers
the kubelet's probes with 503 as well, which ends a worker for being busy.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

TOO_MANY_CONNECTIONS = "pdcluster.crowded"
"""Mark in the scope's state of a request that came while as many others were open as may be."""

ConnectionT = TypeVar("ConnectionT")


class OpenConnections(Generic[ConnectionT]):
    """Pure bookkeeping.

    most:  connections with an open request
    spare: connections beyond these
    close: ends a connection that waits for a request, or has its answer
    """

    def __init__(self, most: int, spare: int, close: Callable[[ConnectionT], None]) -> None:
        self._most = most
        self._spare = spare
        self._close = close
        self._open: set[ConnectionT] = set()
        self._idle: dict[ConnectionT, None] = {}  # the longest idle one first

    def enter(self, connection: ConnectionT) -> bool:
        """A new one, which waits for its first request; False when there is no room for it."""
        if len(self._open) >= self._most + self._spare:
            if not self._idle:
                return False
            longest = next(iter(self._idle))
            self.leave(longest)
            self._close(longest)
        self._open.add(connection)
        self._idle[connection] = None
        return True

    def busy(self, connection: ConnectionT) -> bool:
        """A request has begun, its header is whole; False when it is one more than may be open."""
        self._idle.pop(connection, None)
        return len(self._open) - len(self._idle) <= self._most

    def idle(self, connection: ConnectionT) -> None:
        """Its answer is whole: it waits for another request, or for its end."""
        if connection in self._open:
            self._idle[connection] = None

    def leave(self, connection: ConnectionT) -> None:
        """Forget a connection that is closed, or about to be."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
