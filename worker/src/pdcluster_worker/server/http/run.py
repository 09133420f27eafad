"""Serves an application over HTTP with uvicorn, inside the caller's event loop; signals are the
caller's.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from typing import Protocol, cast

import uvicorn
from starlette.types import ASGIApp

from pdcluster_worker.errors import ConfigError
from pdcluster_worker.server.http.connection import HttpConnection
from pdcluster_worker.server.http.limits import HttpLimits, LimitsNow, OpenConnections
from pdcluster_worker.server.http.unacked_responses import UnackedResponses
from pdcluster_worker.system.process import FILES_OF_RELAYED, fitting

_BACKLOG = 2048
_POLL_SECONDS = 0.05

_LAST_SECONDS = 0.1
"""Time from the order to end to the last accept: what closes while connections wait for one resets
them.
"""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop_requested = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._stop_requested.set()

    async def main_loop(self) -> None:
        """Run until `end`; the Date header, for which uvicorn's loop looks, is `raw_http`'s."""
        await self._stop_requested.wait()
        await asyncio.sleep(_LAST_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Answering(Protocol):
    """A connection of whatever protocol; see `HttpConnection`."""

    @property
    def is_answering(self) -> bool: ...

    @property
    def name(self) -> str | None: ...


Front = Callable[[type[HttpConnection]], type[asyncio.Protocol]]
"""Returns the protocol of new connections, which may hand them to one of this type."""


class HttpServer:
    def __init__(self, server: _Server, bound: socket.socket) -> None:
        self._server = server
        host, self.port = bound.getsockname()[:2]
        self._unsent = UnackedResponses(host, self.port)
        self.finished = asyncio.create_task(server.serve(sockets=[bound]))

    def refuse(self) -> None:
        """Accept no more, and close each connection when its open request ends; returns at once."""
        self._server.end()

    @property
    def num_answering(self) -> int:
        return len(self._answering())

    async def unacked(self) -> frozenset[str]:
        """Connections whose clients have yet to take something; the kernel last, as bytes may go to
        it.
        """
        answering = {
            name for connection in self._answering() if (name := connection.name) is not None
        }
        return frozenset(answering) | await self._unsent.connections()

    def _answering(self) -> list[Answering]:
        connections = cast(set[Answering], self._server.server_state.connections)
        return [connection for connection in connections if connection.is_answering]

    async def has_finished(self, timeout_seconds: float) -> bool:
        """After `refuse`: whether the last open request has ended, within that time."""
        done, _ = await asyncio.wait({self.finished}, timeout=timeout_seconds)
        return bool(done)

    async def close(self) -> None:
        self._server.end()
        while not self.finished.done():
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.wait({self.finished}, timeout=_POLL_SECONDS)


async def serve(
    app: ASGIApp,
    host: str,
    port: int,
    limits: LimitsNow = HttpLimits,
    front: Front | None = None,
) -> HttpServer:
    """Bind and serve.  Raises ConfigError when the address cannot be had.

    front: what takes connections in place of ours, which it gets.
    """
    bound = _bind(host, port)
    files_each = 1 if front is None else FILES_OF_RELAYED
    most = fitting(limits().max_connections, files_each=files_each)
    shared = OpenConnections(most, limits().spare_connections)
    connections = type(
        "Connection",
        (HttpConnection,),
        {"limits_now": staticmethod(limits), "open_connections": shared},
    )
    config = uvicorn.Config(
        app,
        http=connections if front is None else front(connections),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        backlog=_BACKLOG,
    )
    return HttpServer(_Server(config), bound)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(_BACKLOG)
    except OSError as e:
        bound.close()
        if e.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} is taken: stop what listens on {host}:{port}, or set listen.http to "
                "another port (0 = any)"
            ) from e
        raise ConfigError(
            f"cannot listen on {host}:{port}: {e.strerror}: set listen.host and listen.http to an "
            "address of this machine"
        ) from e
    bound.setblocking(False)
    return bound
