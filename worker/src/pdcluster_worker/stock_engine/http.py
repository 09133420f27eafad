"""HTTP/1.1 client of one server on loopback: a connection for each request."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httptools

GET_SECONDS = 5.0  # for an answer to `get`

MAX_ATTEMPTS = 4  # of an answer in time, for a machine under full load

MAX_ERROR_BYTES = 300  # of an error's body in the message

_READ_BYTES = 1 << 16


class HttpFailedError(Exception):
    """is_refused: connection refused.  is_late: timeout; a retry may succeed.  status: of an answer
    that is none of success; 0 = there was none.
    """

    def __init__(
        self, message: str, *, is_refused: bool = False, is_late: bool = False, status: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.is_refused = is_refused
        self.is_late = is_late


class HttpAnswer:
    """One answer, whose head has come."""

    def __init__(self, reader: asyncio.StreamReader, address: str) -> None:
        self.status = 0
        self._reader = reader
        self._address = address
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._is_whole = False

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes.  Raises HttpFailedError where it breaks off."""
        while True:
            chunks, self._chunks = self._chunks, []
            for chunk in chunks:
                yield chunk
            if self._is_whole:
                return
            await self._feed()

    async def body(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def read_head(self) -> None:
        while not self.status:
            await self._feed()

    async def _feed(self) -> None:
        try:
            data = await self._reader.read(_READ_BYTES)
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            raise HttpFailedError(f"{self._address} does not speak HTTP: {e}") from e
        except OSError:
            data = b""
        if not data and not self._is_whole:
            raise HttpFailedError(f"{self._address} closed the connection")

    # --- httptools' callbacks ---------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._is_whole = True


class StockClient:
    """rank: the one of several that computes its requests; None = there is one."""

    def __init__(self, port: int, rank: int | None = None) -> None:
        self._address = f"127.0.0.1:{port}"
        self._port = port
        self._lines = ["Host: localhost", "Connection: close"]
        if rank is not None:
            self._lines.append(f"X-data-parallel-rank: {rank}")

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[HttpAnswer]:
        """The server sees its connection end with the block.  Raises HttpFailedError."""
        lines = [f"{method} {path} HTTP/1.1", *self._lines]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError as e:
            raise HttpFailedError(
                f"cannot connect to {self._address}: {e.strerror or e}",
                is_refused=isinstance(e, ConnectionRefusedError),
            ) from e
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            answer = HttpAnswer(reader, self._address)
            await answer.read_head()
            yield answer
        finally:
            writer.transport.abort()

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
