"""HTTP/1.1 client for one server on loopback; data reaches an exchange without tasks or queues."""

import asyncio
from collections.abc import Mapping
from typing import cast

import httptools

GET_SECONDS = 5.0  # for an answer to `get`

MAX_ATTEMPTS = 4  # of an answer in time, for a machine under full load

MAX_ERROR_BYTES = 300  # of an error's body in the message


class HttpFailedError(Exception):
    """is_refused: connection refused.  is_late: timeout; a retry may succeed."""

    def __init__(self, message: str, *, is_refused: bool = False, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused
        self.is_late = is_late


class HttpExchange:
    """Exactly one of `on_end` and `on_lost` is called, and nothing after `close`."""

    status = 0
    is_refused = False  # nothing listens at the port
    _connection: "_Connection | None" = None
    _is_closed = False

    def __init__(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
        for name, value in (headers or {}).items():
            head += f"{name}: {value}\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.sent = head.encode() + b"\r\n" + body

    def on_body(self, data: bytes) -> None:
        pass

    def on_end(self) -> None:
        """The answer is complete."""

    def on_lost(self, reason: str) -> None:
        """No complete answer comes."""

    def close(self) -> None:
        """Abort: the server sees its connection end."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.abandon()

    @property
    def is_closed(self) -> bool:
        return self._is_closed


class _WholeExchange(HttpExchange):
    def __init__(self, method: str, path: str, body: bytes = b"") -> None:
        super().__init__(method, path, body)
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._parts: list[bytes] = []

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_end(self) -> None:
        if not self.answer.done():
            self.answer.set_result(b"".join(self._parts))

    def on_lost(self, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(HttpFailedError(reason, is_refused=self.is_refused))


class VllmClient:
    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._port = port
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    def begin(self, exchange: HttpExchange) -> None:
        """Send a request; the exchange gets the answer."""
        if self._idle:
            self._idle.pop().begin(exchange, is_kept=True)
        else:
            self._connect(exchange)

    async def get(self, path: str) -> bytes:
        """Return the body of a 200.  Raises HttpFailedError."""
        try:
            async with asyncio.timeout(GET_SECONDS):  # wait_for may lose a cancellation
                return await self._whole(_WholeExchange("GET", path))
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
        return await self._whole(_WholeExchange("POST", path, body))

    async def _whole(self, exchange: _WholeExchange) -> bytes:
        self.begin(exchange)
        try:
            body = await exchange.answer
        finally:
            exchange.close()
        if exchange.status != 200:
            text = body[:MAX_ERROR_BYTES].decode(errors="replace")
            raise HttpFailedError(f"the engine answered {exchange.status}: {text}")
        return body

    def close(self) -> None:
        """Exchanges in flight get no call."""
        for task in self._connecting:
            task.cancel()
        for connection in list(self._open):
            connection.abandon()

    def _connect(self, exchange: HttpExchange) -> None:
        task = asyncio.create_task(self._connected(exchange))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connected(self, exchange: HttpExchange) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self), "127.0.0.1", self._port
            )
        except OSError as e:
            if not exchange.is_closed:
                exchange.is_refused = isinstance(e, ConnectionRefusedError)
                exchange.on_lost(f"cannot connect to {self.address}: {e.strerror or e}")
            return
        if exchange.is_closed:
            self._idle.append(connection)
        else:
            connection.begin(exchange, is_kept=False)

    # --- called by connections --------------------------------------------------------------

    def opened(self, connection: "_Connection") -> None:
        self._open.add(connection)

    def freed(self, connection: "_Connection") -> None:
        self._idle.append(connection)

    def ended(self, connection: "_Connection", retried: HttpExchange | None) -> None:
        """retried: an exchange that the server closed the kept connection on, unseen."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if retried is not None and not retried.is_closed:
            self._connect(retried)


class _Connection(asyncio.Protocol):
    def __init__(self, owner: VllmClient) -> None:
        self._owner = owner
        self._exchange: HttpExchange | None = None
        self._transport: asyncio.Transport | None = None
        self._is_kept = self._has_answer = False

    def begin(self, exchange: HttpExchange, *, is_kept: bool) -> None:
        """is_kept: reused, so the server may be closing it."""
        assert self._transport is not None, "only an open connection is used"
        self._exchange, exchange._connection = exchange, self
        self._is_kept, self._has_answer = is_kept, False
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(exchange.sent)

    def abandon(self) -> None:
        """Its exchange gets no more calls."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:
            return
        self._has_answer = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._lose(f"{self._owner.address} does not speak HTTP: {e}")

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        retried = exchange if self._is_kept and not self._has_answer else None
        self._owner.ended(self, retried)
        if exchange is not None and retried is None:
            exchange._connection = None
            exchange.on_lost(f"{self._owner.address} closed the connection")

    # --- httptools' callbacks ---------------------------------------------------------------

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.on_body(body)

    def on_message_complete(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        exchange._connection = None
        if self._parser.should_keep_alive():
            self._owner.freed(self)
        elif self._transport is not None:
            self._transport.close()
        exchange.on_end()

    def _lose(self, reason: str) -> None:
        exchange = self._exchange
        self.abandon()
        if exchange is not None:
            exchange._connection = None
            exchange.on_lost(reason)
