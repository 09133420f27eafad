"""Limit of open connections.  A new one takes the place of the longest idle one; spare places are
for probes, which uvicorn's `limit_concurrency` answers with 503 too, so a busy worker is restarted.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

TOO_MANY_CONNECTIONS = "pdcluster.crowded"
"""Mark in the scope's state of a request that came while as many others were open as may be."""

ConnectionT = TypeVar("ConnectionT")


class OpenConnections(Generic[ConnectionT]):
    """most: connections with an open request.  close: ends one that waits for a request."""

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
        self._idle.pop(connection, None)
        return len(self._open) - len(self._idle) <= self._most

    def idle(self, connection: ConnectionT) -> None:
        if connection in self._open:
            self._idle[connection] = None

    def leave(self, connection: ConnectionT) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)
