"""Bound of the connections that the HTTP server has at once.

Where there is no room, a new connection takes the place of the connection that has
waited longest for a request, half a header included: closing an idle one is
what any server may do, and a crowd of silent ones cannot shut the door.  So is
closing one that has its answer and still sends a body (`unread`).  A few
places more than requests for the API may have are for probes and scrapes; a
request for the API that would take one of these is answered 503.

uvicorn's own `limit_concurrency` would not do: it closes nothing, and answers
the kubelet's probes with 503 as well, which ends a worker for being busy.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from prometheus_client import Counter
from starlette.types import ASGIApp, Receive, Scope, Send

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import openai as openai_errors
from pdcluster_worker.server.errors import shapes as error_shapes
from pdcluster_worker.server.http import early_response
from pdcluster_worker.server.http.authorization import is_api
from pdcluster_worker.server.http.limits import LimitsNow

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


class ConnectionLimit:
    """Middleware: answers requests for the API that are too many."""

    def __init__(self, app: ASGIApp, limits: LimitsNow, rejected: Counter) -> None:
        self._app = app
        self._limits = limits
        self._rejected = rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer 503."""
        if TOO_MANY_CONNECTIONS not in scope.get("state", {}) or not is_api(scope["path"]):
            await self._app(scope, receive, send)
            return
        message = "this server has as many open requests as it takes: retry later"
        error = RequestError(message, status=503, code="connections_full", retry_after_seconds=1)
        self._rejected.labels(openai_errors.reason(error)).inc()
        response = error_shapes.response(error, scope, {"connection": "close"})
        await early_response.answer(response, scope, receive, send, self._limits())
