"""Limits of the HTTP server for all its clients together.  A new connection takes the place of the
longest idle one; spare places are for probes, which uvicorn's `limit_concurrency` answers with 503
too, so a busy worker is restarted.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from pdcluster_schema.service import HttpLimitsSpec


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Defaults of every worker.

    max_connections:       with an open request at once; a stream is open for as long as it runs.
    spare_connections:     beyond these, for probes and scrapes; idle ones take any free place.
    keep_alive_seconds:    for the next request, or the first; by default more than the idle time of
                           common clients' pools, so that they close first.
    header_seconds:        from the first byte of a request to the end of its header.
    max_header_bytes:      of a header; trailers and the framing of chunks may have as much again,
                           and 8 times the body.
    max_headers:           fields of a header, trailers included.
    body_seconds:          from the header to the end of the body,
    body_bytes_per_second: and one second more for as many bytes as this that have come.
    max_bodies_bytes:      bodies of all open requests together, as far as they have come.
    linger_seconds:        after an answer that did not wait for the body, for the client to stop
    linger_bytes:          sending it: closing at once would reset the connection, and the client
                           might lose the answer.  What comes is dropped.
    """

    max_connections: int = 2048
    spare_connections: int = 64
    keep_alive_seconds: int = 75
    header_seconds: float = 10.0
    max_header_bytes: int = 64 << 10
    max_headers: int = 128
    body_seconds: float = 10.0
    body_bytes_per_second: int = 64 << 10
    max_bodies_bytes: int = 256 << 20
    linger_seconds: float = 5.0
    linger_bytes: int = 64 << 20

    def body_deadline(self, num_bytes: int) -> float:
        """Seconds after the header in which the body must end, when so many bytes have come."""
        return self.body_seconds + num_bytes / self.body_bytes_per_second


LimitsNow = Callable[[], HttpLimits]
"""Returns the limits in force now."""


@lru_cache(maxsize=4)
def limits_of(policy: HttpLimitsSpec) -> HttpLimits:
    return HttpLimits(**dict(policy))


TOO_MANY_CONNECTIONS = "pdcluster.crowded"
"""Mark in the scope's state of a request that came while as many others were open as may be."""


class OpenConnections:
    """Transports of clients.  most: with an open request."""

    def __init__(self, most: int, spare: int) -> None:
        self._most = most
        self._spare = spare
        self._open: set[asyncio.Transport] = set()
        self._idle: dict[asyncio.Transport, None] = {}  # the longest idle one first

    def enter(self, connection: asyncio.Transport) -> bool:
        """A new one, which waits for its first request; False when there is no room for it."""
        if len(self._open) >= self._most + self._spare:
            if not self._idle:
                return False
            longest = next(iter(self._idle))
            self.leave(longest)
            longest.close()
        self._open.add(connection)
        self._idle[connection] = None
        return True

    def busy(self, connection: asyncio.Transport) -> bool:
        """False = more of them have an open request than may."""
        self._idle.pop(connection, None)
        return len(self._open) - len(self._idle) <= self._most

    def idle(self, connection: asyncio.Transport) -> None:
        if connection in self._open:
            self._idle[connection] = None

    def leave(self, connection: asyncio.Transport) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)
