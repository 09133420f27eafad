"""Listener at which headless engines join: engines on other hosts."""

import asyncio
import contextlib
import logging

import msgspec

from pdcluster_schema.ports import MAX_ENGINES
from pdcluster_worker.config.worker import WorkerConfig
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.headless import (
    HELLO_BYTES,
    HELLO_SECONDS,
    VERSION,
    HeadConnectionError,
    HeadHello,
    HeadReply,
    decode_hello,
    encode,
    read_frame,
    server_context,
    write_frame,
)
from pdcluster_worker.serving.engines.client import EngineClient, EngineDiedError
from pdcluster_worker.serving.engines.group import Child, EngineGroup

logger = logging.getLogger(__name__)


CALL_SECONDS = 1.0
"""Period of pings of an engine that loads."""


class HeadlessSocket:
    """Implements `client.FrameSocket` over one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def recv(self) -> bytes:
        return await read_frame(self._reader)

    async def send(self, data: bytes) -> None:
        write_frame(self._writer, data)
        await self._writer.drain()


class HeadlessChild(Child):
    """One headless engine, seen from its head.  stop: its supervisor starts it again."""

    def __init__(
        self, rank: int, node: str, socket: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        super().__init__(rank, EngineClient(HeadlessSocket(*socket)))
        self._node = node
        self._writer = socket[1]

    async def start(self) -> None:
        """Listen to it; the answer has given its dtype."""
        name = f"engine {self.rank} of {self._node}"
        self._tasks = [asyncio.create_task(self._talk(), name=name)]

    def _kill(self) -> None:
        """Cut its channel, at which it ends."""
        self._writer.transport.abort()

    async def stop(self) -> None:
        self._writer.close()
        await super().stop()

    async def _talk(self) -> None:
        calling = asyncio.create_task(self._call_while_it_loads())
        try:
            await self.client.run()
        except (HeadConnectionError, OSError, msgspec.DecodeError) as e:
            self.client.fail(f"its node {self._node} is gone: {e}")
            self.exit_status.set_result(1)
        finally:
            calling.cancel()

    async def _call_while_it_loads(self) -> None:
        """Ping it while it loads: it takes a silent head for gone."""
        while self.client.is_loading:
            self.client.ping()
            with contextlib.suppress(TimeoutError, EngineDiedError):
                await asyncio.wait_for(self.client.ready(), CALL_SECONDS)


class HeadlessListener:
    """The listener of one head.  dtype: what all its engines compute in."""

    def __init__(self, config: WorkerConfig, dtype: str, group: EngineGroup) -> None:
        self.port = 0
        self._config = config
        self._dtype = dtype
        self._group = group
        self._server: asyncio.Server | None = None
        self._meetings: set[asyncio.Task[None]] = set()

    async def open(self, port: int) -> None:
        """Listen.  Raises ConfigError when the port cannot be used."""
        host = self._config.listen.host
        try:
            self._server = await asyncio.start_server(
                self._on_connection, host, port, ssl=server_context(self._config.tls)
            )
        except OSError as e:
            raise ConfigError(
                f"listen.head: cannot listen on {host}:{port}: {e.strerror or e}"
            ) from e
        self.port = self._server.sockets[0].getsockname()[1]
        logger.info("accepting headless engines port=%d", self.port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._meetings:
            task.cancel()
        await asyncio.gather(*self._meetings, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._meet(reader, writer), name="headless engine")
        self._meetings.add(task)
        task.add_done_callback(self._meetings.discard)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except (HeadConnectionError, OSError, TimeoutError, msgspec.DecodeError) as e:
            logger.warning(
                "a connection to the head ended before its hello reason=%s",
                str(e) or type(e).__name__,
            )
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = decode_hello(await asyncio.wait_for(read_frame(reader, HELLO_BYTES), HELLO_SECONDS))
        rank = self._group.free_rank()
        refused = self._refusal(hello, rank)
        write_frame(
            writer, encode(HeadReply(refused=refused) if refused else HeadReply(dtype=self._dtype))
        )
        await writer.drain()
        if refused or rank is None:
            logger.warning("refused a headless engine node=%s reason=%s", hello.node, refused)
            return
        logger.info("a headless engine joins node=%s rank=%d", hello.node, rank)
        child = HeadlessChild(rank, hello.node, (reader, writer))
        try:
            await self._group.adopt(child, hello.address)
        finally:
            await child.stop()
        logger.warning(
            "a headless engine is gone node=%s rank=%d reason=%s",
            hello.node,
            rank,
            child.client.died,
        )

    def _refusal(self, hello: HeadHello, rank: int | None) -> str:
        mine, config = (VERSION, *_named(self._config)), self._config
        theirs = (hello.version, hello.cluster, hello.revision, hello.role)
        if theirs != mine:
            named = zip(("version", "cluster", "revision", "role"), mine, theirs, strict=True)
            return "; ".join(
                f"its {what} is {other!r}, the head's {own!r}"
                for what, own, other in named
                if own != other
            )
        if rank is None:
            return (
                f"the head has {config.engine.data_parallel_size} engines and others on nodes, at "
                f"most {MAX_ENGINES} together"
            )
        return ""


def _named(config: WorkerConfig) -> tuple[str, str, str]:
    return config.cluster, config.revision, config.role
