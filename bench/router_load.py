"""A load generator that costs little: one process offers thousands of requests a second over kept
connections.

Open loop: requests are sent at times that were drawn before, whatever the answers do.  Closed loop:
as many as there are connections, each sends its next request when it has its answer.  A time
is counted from where the request was handed to the socket.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import cast

import httptools

ANSWER_SECONDS = 20.0


class LoadError(Exception):
    """A request was not answered as it should have been."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from the request to the first byte of a body, and to its last."""

    first_seconds: float
    last_seconds: float


@dataclass(slots=True)
class Measured:
    """One run.  seconds: from the first request to the last answer; late_seconds: of each request,
    behind its time.
    """

    answers: list[Answer] = field(default_factory=list)
    late_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Connection(asyncio.Protocol):
    """Asks one thing at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._answered: asyncio.Future[Answer] | None = None
        self._sent = self._first = 0.0
        self._is_whole = False
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop has a class of its own

    def ask(self, request: bytes) -> "asyncio.Future[Answer]":
        """Send it now; the answer fails with LoadError."""
        self._answered = asyncio.get_running_loop().create_future()
        self._first = 0.0
        self._sent = time.perf_counter()
        self.transport.write(request)
        return self._answered

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        if self._is_whole:
            self._parser, self._is_whole = httptools.HttpResponseParser(self), False

    def on_body(self, body: bytes) -> None:
        if not self._first:
            self._first = time.perf_counter()
        if self._parser.get_status_code() != 200:
            self._fail(f"status {self._parser.get_status_code()}: {body[:300]!r}")

    def on_message_complete(self) -> None:
        answered, self._answered = self._answered, None
        if answered is not None and not answered.done():
            now = time.perf_counter()
            answered.set_result(Answer(self._first - self._sent, now - self._sent))
        self._is_whole = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was closed: {exc}")
        self.lost.set()

    def _fail(self, reason: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(LoadError(reason))


class Connections:
    """Kept connections to addresses that are taken in turn."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._turn = itertools.cycle(addresses)
        self._idle: dict[str, list[Connection]] = {address: [] for address in addresses}
        self._all: list[Connection] = []

    async def ask(self, request: bytes) -> Answer:
        """One request, at the next address.  Raises LoadError, TimeoutError."""
        address = next(self._turn)
        idle = self._idle[address]
        connection = idle.pop() if idle else await self._open(address)
        answer = await asyncio.wait_for(connection.ask(request), ANSWER_SECONDS)
        idle.append(connection)
        return answer

    async def open(self, number: int) -> None:
        """So many to each address."""
        for address, idle in self._idle.items():
            idle += [await self._open(address) for _ in range(number - len(idle))]

    async def close(self) -> None:
        """Close all, and wait for their end."""
        for connection in self._all:
            connection.transport.close()
        for connection in self._all:
            await connection.lost.wait()

    async def _open(self, address: str) -> Connection:
        host, _, port = address.rpartition(":")
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, host, int(port)
        )
        self._all.append(connection)
        return connection


def arrivals(rate: float, seconds: float, draw: Random) -> Iterator[float]:
    """Times of a Poisson process, in seconds from its beginning."""
    at = draw.expovariate(rate)
    while at < seconds:
        yield at
        at += draw.expovariate(rate)


async def open_loop(connections: Connections, request: bytes, times: Sequence[float]) -> Measured:
    """Send at these times, and wait for all answers.  Raises LoadError, TimeoutError."""
    loop, measured = asyncio.get_running_loop(), Measured()
    start = loop.time()
    tasks = []
    for at in times:
        if (wait := start + at - loop.time()) > 0:
            await asyncio.sleep(wait)
        measured.late_seconds.append(max(0.0, loop.time() - start - at))
        tasks.append(asyncio.create_task(connections.ask(request)))
    measured.answers = await asyncio.gather(*tasks)
    measured.seconds = loop.time() - start
    return measured


async def closed_loop(
    connections: Connections, request: bytes, concurrency: int, seconds: float
) -> Measured:
    """Ask without pauses.  Raises LoadError, TimeoutError."""
    loop, measured = asyncio.get_running_loop(), Measured()
    start = loop.time()

    async def ask() -> None:
        while loop.time() - start < seconds:
            measured.answers.append(await connections.ask(request))

    await asyncio.gather(*(ask() for _ in range(concurrency)))
    measured.seconds = loop.time() - start
    return measured
