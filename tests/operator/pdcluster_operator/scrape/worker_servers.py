"""Workers' HTTP listeners on loopback that answer, or misbehave, byte by byte as a test says."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self

from pdcluster_operator.scrape.page import ScrapeTarget

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Reply to one request that was read; the connection is kept open unless it closes it."""

CHAT = ("serving", "chat")


@dataclass
class WorkerServer:
    """A context manager.

    port:            0 = a free one; that of the listener once inside
    requests:        heads of all requests so far
    num_connections: so far
    num_open:        connections that neither side has closed
    """

    behaviour: Behaviour
    port: int = 0
    requests: list[str] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0

    async def __aenter__(self) -> Self:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def target(
        self,
        pod: str = "p-0",
        *,
        role: str = "prefill",
        pool: str = "cpu",
        cluster: tuple[str, str] = CHAT,
    ) -> ScrapeTarget:
        """Its worker, as one to scrape."""
        return ScrapeTarget(cluster, role, pool, pod, f"127.0.0.1:{self.port}")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        self.num_open += 1
        try:
            while True:
                self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
                await self.behaviour(reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the other side went away, or the test is over
        finally:
            self.num_open -= 1
            self._tasks.discard(task)
            writer.close()


def http(body: bytes, *, status: str = "200 OK", headers: str = "") -> bytes:
    """A whole answer."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def sends(data: bytes, *, then_closes: bool = False) -> Behaviour:
    """The same bytes for each request."""
    return serves(lambda: data, then_closes=then_closes)


def serves(data: Callable[[], bytes], *, then_closes: bool = False) -> Behaviour:
    """Bytes that are made for each request."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data())
        if then_closes:
            writer.close()

    return behave


def sends_endlessly(head: bytes, data: bytes) -> Behaviour:
    """A head, then the same bytes until the connection is closed by the other side."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while not writer.is_closing():
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0)

    return behave


def hangs_after(data: bytes = b"") -> Behaviour:
    """Some bytes, and nothing more until the other side closes."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await reader.read()
        raise ConnectionResetError

    return behave
