"""HTTP/1.1 client of one server on loopback.  A connection serves one request at a time, and again
within `IDLE_SECONDS` of a whole answer; the server sees the end of any other.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import httptools

GET_SECONDS = 5.0  # for an answer to `get`

IDLE_SECONDS = 1.0  # for a connection without a request; uvicorn closes it after 5

MAX_ATTEMPTS = 4  # of an answer in time, for a machine under full load

MAX_ERROR_BYTES = 300  # of an error's body in the message


class HttpFailedError(Exception):
    """is_refused: connection refused.  is_late: timeout; a retry may succeed.  is_cut: the
    connection was closed.  status: of an answer that is none of success; 0 = there was none.
    """

    def __init__(
        self,
        message: str,
        *,
        is_refused: bool = False,
        is_late: bool = False,
        is_cut: bool = False,
        status: int = 0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.is_cut = is_cut
        self.is_refused = is_refused
        self.is_late = is_late


def _drop(_: bytes) -> None:
    """Take nothing of a body."""


class HttpAnswer(asyncio.Protocol):
    """One answer.  Its body needs no task to be read: one to wake would cost each token more."""

    def __init__(self, address: str) -> None:
        self.status = 0
        self.is_reusable = False  # its connection, for another request
        self._address = address
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []  # of the body, until `follow`
        self._take: Callable[[bytes], None] = self._parts.append
        self._is_whole = False
        self._failure: Exception | None = None
        self._progress: asyncio.Future[None] | None = None

    async def wait_for_head(self) -> None:
        """Wait for its status.  Raises HttpFailedError."""
        await self._until(lambda: self.status > 0)

    async def wait_for_body(self) -> None:
        """Wait until its body begins.  Raises HttpFailedError."""
        await self._until(lambda: bool(self._parts) or self._is_whole)

    async def follow(self, take: Callable[[bytes], None]) -> None:
        """Give `take` the body as it comes.  Raises what it raises, and HttpFailedError where the
        body breaks off.
        """
        parts, self._parts, self._take = self._parts, [], take
        for part in parts:
            take(part)
        await self._until(lambda: self._is_whole and self._failure is None)

    async def body(self) -> bytes:
        await self._until(lambda: self._is_whole)
        return b"".join(self._parts)

    def close(self) -> None:
        """Let go of its parser and of what took the body, which would wait for the collector."""
        self._parser, self._parts, self._take = None, [], _drop

    async def _until(self, has_come: Callable[[], bool]) -> None:
        while not has_come():
            if self._failure is not None:
                raise self._failure
            self._progress = asyncio.get_running_loop().create_future()
            await self._progress

    def _wake(self) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    def _fail(self, failure: Exception) -> None:
        if not self._is_whole:
            self._failure = self._failure or failure
            self._wake()

    # --- asyncio's and httptools' callbacks ---------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._fail(HttpFailedError(f"{self._address} does not speak HTTP: {e}"))

    def connection_lost(self, _: Exception | None) -> None:
        self._fail(HttpFailedError(f"{self._address} closed the connection", is_cut=True))

    def on_headers_complete(self) -> None:
        if self._parser is not None:
            self.status = self._parser.get_status_code()
        self._wake()

    def on_body(self, body: bytes) -> None:
        if self._failure is not None:
            return
        try:
            self._take(body)
        except Exception as e:  # the parser would wrap it
            self._fail(e)
        if self._parts:
            self._wake()

    def on_message_complete(self) -> None:
        self._is_whole = True
        if self._parser is not None:
            self.is_reusable = self._failure is None and self._parser.should_keep_alive()
        self._wake()


_IDLE = asyncio.Protocol()  # of a connection between two requests


class StockClient:
    """rank: the one of several that computes its requests; None = there is one."""

    def __init__(self, port: int, rank: int | None = None) -> None:
        self._address = f"127.0.0.1:{port}"
        self._port = port
        self._lines = ["Host: localhost"]
        if rank is not None:
            self._lines.append(f"X-data-parallel-rank: {rank}")
        self._idle: list[tuple[asyncio.Transport, float]] = []  # and since when

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[HttpAnswer]:
        """The server sees its connection end with the block, unless the answer was whole.

        Raises HttpFailedError.
        """
        lines = [f"{method} {path} HTTP/1.1", *self._lines]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        data = "\r\n".join([*lines, "", ""]).encode() + body
        used = self._take_idle()
        transport, answer = used or await self._connect()
        try:
            transport.write(data)
            try:
                await answer.wait_for_head()
            except HttpFailedError as e:
                if used is None or not e.is_cut:
                    raise
                transport, answer = await self._connect()  # closed before it took the request
                transport.write(data)
                await answer.wait_for_head()
            yield answer
        finally:
            if answer.is_reusable and not transport.is_closing():
                transport.set_protocol(_IDLE)
                self._idle.append((transport, time.monotonic()))
            else:
                transport.abort()
            answer.close()

    def close(self) -> None:
        """Close the connections that serve no request."""
        while self._idle:
            self._idle.pop()[0].abort()

    def _take_idle(self) -> tuple[asyncio.Transport, HttpAnswer] | None:
        """The connection used last, and its next answer."""
        while self._idle:
            transport, since = self._idle.pop()
            if transport.is_closing() or time.monotonic() - since > IDLE_SECONDS:
                transport.abort()
                continue
            answer = HttpAnswer(self._address)
            transport.set_protocol(answer)
            return transport, answer
        return None

    async def _connect(self) -> tuple[asyncio.Transport, HttpAnswer]:
        try:
            return await asyncio.get_running_loop().create_connection(
                lambda: HttpAnswer(self._address), "127.0.0.1", self._port
            )
        except OSError as e:
            raise HttpFailedError(
                f"cannot connect to {self._address}: {e.strerror or e}",
                is_refused=isinstance(e, ConnectionRefusedError),
            ) from e

    async def get(self, path: str) -> bytes:
        """Return the body of a 200.  Raises HttpFailedError."""
        try:
            async with asyncio.timeout(GET_SECONDS):  # wait_for may lose a cancellation
                return await self._ok("GET", path)
        except TimeoutError as e:
            message = f"no answer to {path} in {GET_SECONDS:g} s"
            raise HttpFailedError(message, is_late=True) from e

    async def get_patiently(self, path: str) -> bytes:
        """`get` with up to MAX_ATTEMPTS after timeouts.  Raises HttpFailedError."""
        for _ in range(MAX_ATTEMPTS - 1):
            try:
                return await self.get(path)
            except HttpFailedError as e:
                if not e.is_late:
                    raise
        return await self.get(path)

    async def post(self, path: str, body: bytes) -> bytes:
        """Return the body of a 200, without a timeout.  Raises HttpFailedError."""
        return await self._ok("POST", path, body)

    async def _ok(self, method: str, path: str, body: bytes = b"") -> bytes:
        async with self.request(method, path, body) as answer:
            content = await answer.body()
        if answer.status != 200:
            text = content[:MAX_ERROR_BYTES].decode(errors="replace")
            message = f"the engine answered {answer.status} to {path}: {text}"
            raise HttpFailedError(message, status=answer.status)
        return content
