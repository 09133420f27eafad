"""A relaying router on real sockets: workers that answer what a test says, the router's own server
with an application that says what came to it, and clients that send bytes.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.routing import RelayingSpec
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.proxy.picker import UpstreamState
from pdcluster_worker.proxy.reverse_proxy import ReverseProxy
from pdcluster_worker.server.http.run import HttpServer

SECONDS = 20
CHAT = "/v1/chat/completions"


def whole(body: bytes, status: str = "200 OK", *fields: str) -> bytes:
    upstreams = [f"HTTP/1.1 {status}", *fields, f"content-length: {len(body)}", "", ""]
    return "\r\n".join(upstreams).encode() + body


def post(body: bytes = b'{"a": 1}', path: str = CHAT, *fields: str) -> bytes:
    plain = ("Host: api", "Authorization: Bearer k", f"Content-Length: {len(body)}")
    return "\r\n".join([f"POST {path} HTTP/1.1", *plain, *fields, "", ""]).encode() + body


class FakeWorker:
    """A worker's HTTP port.  script: called with each request's bytes and the writer.

    requests: that came whole; gone: the router has ended a connection; writer: of the last one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[bytes] = []
        self.gone = asyncio.Event()
        self.num_connections = 0
        self.script: Callable[[asyncio.StreamWriter], object] = self.say_name
        self._writers: set[asyncio.StreamWriter] = set()
        self.writer: asyncio.StreamWriter

    def say_name(self, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(self.name.encode()))

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        self.drop()
        await self._server.wait_closed()

    def drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                self.writer = writer
                self.script(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()
        finally:
            self._writers.discard(writer)
            writer.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, request: bytes) -> tuple[bytes, bytes]:
        self.writer.write(request)
        return await self.answer()

    async def answer(self) -> tuple[bytes, bytes]:
        async with asyncio.timeout(SECONDS):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            return head, await self.reader.readexactly(length)

    async def rest(self) -> bytes:
        async with asyncio.timeout(SECONDS):
            return await self.reader.read()


@dataclass
class Rig:
    """All of it.  own: what came to the router's own application, as (method, path, body)."""

    relay: ReverseProxy
    http: HttpServer
    metrics: Metrics
    workers: list[FakeWorker]
    is_draining: bool = False
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    own: list[tuple[str, str, bytes]] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    standing: dict[str, UpstreamState] = field(default_factory=dict)

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.http.port))
        self.clients.append(client)
        return client

    async def ask(self, request: bytes | None = None) -> Client:
        client = await self.connect()
        client.writer.write(request or post())
        return client

    async def send(self, request: bytes | None = None) -> tuple[bytes, bytes]:
        return await (await self.connect()).send(request or post())

    def set_policy(self, **relaying: object) -> None:
        self.policy = self.policy.model_copy(
            update={"relaying": RelayingSpec(**{"enabled": True, **relaying})}
        )
        self.relay.take_policy()

    def stand(self, worker: FakeWorker, **standing: object) -> None:
        self.standing[worker.name] = replace(self.standing[worker.name], **standing)
        self.relay.poll()

    def lose(self, worker: FakeWorker) -> None:
        del self.standing[worker.name]
        self.relay.poll()

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"pdcluster_{name}", labels) or 0.0

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not holds():
                await asyncio.sleep(0.001)
