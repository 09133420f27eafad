"""Serves an application over HTTP with uvicorn, inside the caller's event loop."""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, cast

import uvicorn
from starlette.types import ASGIApp

from pdcluster_worker.errors import ConfigError
from pdcluster_worker.server.http.connection import Addresses, HttpConnection
from pdcluster_worker.server.http.limits import HttpLimits, LimitsNow, OpenConnections
from pdcluster_worker.server.http.open_answers import OpenAnswers
from pdcluster_worker.system.process import FILES_OF_RELAYED, fitting

logger = logging.getLogger(__name__)

TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
"""Tables of the network namespace that this process lives in."""

STALLED_SECONDS = 45.0
"""Less than the default wait after a SIGTERM: `pdctl up` waits 60 s and a pod 300 s."""

REMEMBER_SECONDS = 10.0
"""Looks that lie further apart cannot tell what has moved; a drain looks more often."""

_FIN_BYTES = {"01": 0, "08": 0, "04": 1, "09": 1, "0B": 1}
"""States in which something may wait, and how many of its bytes are the end of the stream."""

_BACKLOG = 2048
_POLL_SECONDS = 0.05

_LAST_SECONDS = 0.1
"""From the order to end to the last accept: closing resets what still waits for one."""


class Answering(Protocol):
    """A connection of whatever protocol; see `HttpConnection`."""

    @property
    def is_answering(self) -> bool: ...

    @property
    def addresses(self) -> Addresses | None: ...


Front = Callable[[type[HttpConnection]], type[asyncio.Protocol]]
"""Returns the protocol of new connections, which may hand them to one of this type."""


class HttpServer(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, bound: socket.socket, open_answers: OpenAnswers
    ) -> None:
        super().__init__(config)
        self.open_answers = open_answers
        self._stop_requested = asyncio.Event()
        host, self.port = bound.getsockname()[:2]
        self._unsent = UnackedResponses(host, self.port)
        self.finished = asyncio.create_task(self.serve(sockets=[bound]))

    async def main_loop(self) -> None:
        """Run until `refuse`; the Date header, for which uvicorn's loop looks, is `raw_http`'s."""
        await self._stop_requested.wait()
        await asyncio.sleep(_LAST_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def refuse(self) -> None:
        """Accept no more, and close each connection when its open request ends; returns at once."""
        self.should_exit = True
        self._stop_requested.set()

    @property
    def num_answering(self) -> int:
        return len(self._answering())

    async def unacked(self) -> frozenset[str]:
        """Connections whose clients have yet to take something; the kernel is asked last."""
        answering = {name(*ends) for each in self._answering() if (ends := each.addresses)}
        return await self._unsent.connections() | answering

    def _answering(self) -> list[Answering]:
        connections = cast(set[Answering], self.server_state.connections)
        return [connection for connection in connections if connection.is_answering]

    async def has_finished(self, timeout_seconds: float) -> bool:
        """After `refuse`: whether the last open request has ended, within that time."""
        done, _ = await asyncio.wait({self.finished}, timeout=timeout_seconds)
        return bool(done)

    async def close(self) -> None:
        self.refuse()
        while not self.finished.done():
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await asyncio.wait({self.finished}, timeout=_POLL_SECONDS)


async def serve(
    app: ASGIApp,
    host: str,
    port: int,
    limits: LimitsNow = HttpLimits,
    front: Front | None = None,
    *,
    open_answers: OpenAnswers | None = None,
) -> HttpServer:
    """Bind and serve.  Raises ConfigError when the address cannot be had.

    front:        what takes connections in place of ours, which it gets.
    open_answers: of the application.
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
    return HttpServer(config, bound, open_answers or OpenAnswers())


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


class UnackedResponses:
    """Finds answers that clients have yet to take, in the kernel's tables, which list connections
    that this process has closed too: they are lost with the pod's network.  A client of which
    nothing moves for STALLED_SECONDS counts no more, so that none holds a drain without end.

    Connections have the names that `name` gives them.  clock: monotonic seconds.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tables: Iterable[Path] = TABLES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local = local_end(host, port)
        self._tables = tuple(tables)
        self._clock = clock
        self._held: dict[str, tuple[int, float]] = {}  # (bytes, since when they are as many)
        self._stalled: set[str] = set()
        self._polled_seconds = clock()

    async def connections(self) -> frozenset[str]:
        """Those whose client has yet to take something, without stalled ones.  Raises OSError."""
        found = await asyncio.to_thread(read, self._tables, self._local)  # tables may be long
        now = self._clock()
        before = self._held if now - self._polled_seconds <= REMEMBER_SECONDS else {}
        self._polled_seconds = now
        self._held = {
            each: before[each] if before.get(each, (0,))[0] == num_bytes else (num_bytes, now)
            for each, num_bytes in found.items()
        }
        stalled = {
            each for each, (_, since) in self._held.items() if now - since >= STALLED_SECONDS
        }
        for each in stalled - self._stalled:
            logger.warning(
                "client reads nothing, no longer waiting for it unsent_bytes=%d seconds=%d",
                *(found[each], STALLED_SECONDS),
            )
        self._stalled = stalled
        return frozenset(found) - stalled


def name(local: tuple[str, int], remote: tuple[str, int]) -> str:
    return f"{_end(*local)} {_end(*remote)}"


def _end(host: str, port: int) -> str:
    packed = ipaddress.ip_address(host).packed  # a zone is no part of it
    # each is printed as a number of this machine
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def local_end(host: str, port: int) -> str:
    """End of the local address of each connection there: the port alone for an unspecified host."""
    end = _end(host, port)
    return end[end.index(":") :] if ipaddress.ip_address(host).is_unspecified else end


def read(tables: Iterable[Path], local: str) -> dict[str, int]:
    """{name: bytes} that the kernel holds for each connection with that `local_end`, those with
    none left out.

    A table that is not there or not for us says nothing.  Raises OSError for any other reason not
    to read one.
    """
    found: dict[str, int] = {}
    for table in tables:
        with (
            contextlib.suppress(FileNotFoundError, PermissionError),
            table.open(encoding="ascii", errors="replace") as lines,
        ):
            found.update(parse(lines, local))
    return found


def parse(lines: Iterable[str], local: str) -> Iterator[tuple[str, int]]:
    """The same for the lines of one table, as proc_pid_net(5) has them."""
    for line in lines:
        fields = line.split()
        if len(fields) < 5 or not fields[1].endswith(local) or fields[3] not in _FIN_BYTES:
            continue
        with contextlib.suppress(ValueError):
            num_bytes = int(fields[4].partition(":")[0], 16) - _FIN_BYTES[fields[3]]
            if num_bytes > 0:
                yield f"{fields[1]} {fields[2]}", num_bytes
