"""Limits of the HTTP server for clients that send too much, too slowly or nothing: raw sockets, the
real application.

Where a test says HUGE the client never sends that body: an answer means that the server did not
wait for it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import AdmissionSpec
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.server.app import create_prefill_app
from pdcluster_worker.server.http.api_keys import ApiKeys
from pdcluster_worker.server.http.limits import HttpLimits
from pdcluster_worker.server.http.run import HttpServer, serve

CHAT = "/v1/chat/completions"
HUGE = "content-length: 1099511627776\r\n"
CHUNKED = "transfer-encoding: chunked\r\n"
SHORT = 0.2
DEADLINE_SECONDS = 20
QUESTION = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
HELLO = json.dumps(QUESTION).encode()


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        return json.loads(self.body)["error"]["code"]

    @property
    def refusal(self) -> tuple[int, str, str]:
        return self.status, self.code, self.headers["connection"]


@dataclass
class Client:
    """One connection, by hand."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, start: str, headers: str = "", body: bytes = b"") -> None:
        head = f"{start} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}\r\n"
        self.writer.write(head.encode() + body)

    async def is_served(self) -> bool:
        self.send("GET /health")
        return (await self.reply()).status == 200

    def post(self, body: bytes, headers: str = "") -> None:
        self.send(f"POST {CHAT}", f"{headers}content-length: {len(body)}\r\n", body)

    def question(self, **fields: object) -> None:
        self.post(json.dumps(QUESTION | fields).encode())

    async def reply(self) -> Reply:
        """The next answer, a whole one: without waiting for the end of the connection."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            status = int((await self.reader.readline()).split()[1])
            lines = iter([line async for line in self._header_lines()])
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines)
            }
            return Reply(
                status,
                headers,
                await self.reader.readexactly(int(headers.get("content-length", 0))),
            )

    async def is_closed(self) -> bool:
        """Waits until the server has closed, whatever it says before."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass
            return True

    async def sends_until_closed(self, data: bytes) -> bool:
        """Goes on sending until the server has closed."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not self.reader.at_eof() and not self.writer.transport.is_closing():
                self.writer.write(data)
                await asyncio.sleep(0.01)
        return await self.is_closed()

    async def _header_lines(self) -> AsyncIterator[str]:
        while (line := (await self.reader.readline()).decode().strip()) != "":
            yield line


@pytest.fixture
async def served(rig) -> AsyncIterator[Callable[..., Awaitable[HttpServer]]]:
    """Serves an application with limits of one's own."""
    servers = []

    async def one(app=None, tenant_of=None, **limits: object) -> HttpServer:
        held = HttpLimits(**{"linger_seconds": SHORT, **limits})
        app = app or rig.make_app(limits=lambda: held, tenant_of=tenant_of)
        servers.append(await serve(app, "127.0.0.1", 0, lambda: held))
        return servers[-1]

    yield one
    rig.backend.gate.set()
    for server in servers:
        await server.close()


@pytest.fixture
async def connect(served) -> AsyncIterator[Callable[..., Awaitable[Client]]]:
    """Connects to a server, by default to one of its own with these limits."""
    clients = []

    async def one(server: HttpServer | None = None, **options: object) -> Client:
        server = server or await served(**options)
        clients.append(Client(*await asyncio.open_connection("127.0.0.1", server.port)))
        return clients[-1]

    yield one
    for client in clients:
        client.writer.close()


@pytest.mark.parametrize("length", [HUGE, CHUNKED])
@pytest.mark.parametrize(
    ("start", "status"),
    [
        ("POST /x", 404),
        ("POST /v1/nothing", 404),
        ("POST /health", 405),
        ("PUT /v1/chat/completions", 405),
        ("GET /health", 200),
    ],
)
async def test_a_body_that_no_route_takes_is_answered_without_being_read(
    connect, start, status, length
):
    client = await connect()
    client.send(start, length)
    reply = await client.reply()

    assert (reply.status, reply.headers["connection"]) == (status, "close")
    assert await client.is_closed()


async def test_a_prefill_worker_reads_no_body_at_all(served, rig, connect):
    client = await connect(await served(create_prefill_app(rig.backend, Metrics(), PolicyConfig)))
    client.send(f"POST {CHAT}", HUGE)

    assert (await client.reply()).status == 404


@pytest.mark.parametrize("authorization", ["", "authorization: Bearer wrong\r\n"])
async def test_without_a_key_no_body_is_read(served, rig, connect, tmp_path: Path, authorization):
    (tmp_path / "alice").write_text("sk-alice")
    client = await connect(await served(tenant_of=ApiKeys(tmp_path).tenant_of))
    client.send(f"POST {CHAT}", HUGE + authorization)
    reply = await client.reply()

    assert reply.refusal == (401, "invalid_api_key", "close")
    assert await client.is_closed()


@pytest.mark.parametrize(
    ("length", "sent"), [(HUGE, b""), (CHUNKED, b"5000\r\n" + bytes(0x5000) + b"\r\n")]
)
async def test_a_body_is_refused_as_soon_as_it_is_too_large(connect, length, sent):
    """By its announcement, or once so much of it has come without an end."""
    client = await connect()
    client.send(f"POST {CHAT}", length, sent)

    assert (await client.reply()).code == "body_too_large"
    assert await client.is_closed()


@pytest.mark.parametrize(
    ("path", "first"), [("/x", b"HTTP/1.1 404 Not Found\r\n"), (CHAT, b"HTTP/1.1 100 Continue\r\n")]
)
async def test_a_client_that_asks_first_gets_100_continue_only_where_its_body_is_read(
    connect, path, first
):
    client = await connect()
    body = json.dumps(QUESTION).encode()
    client.send(f"POST {path}", f"expect: 100-continue\r\ncontent-length: {len(body)}\r\n")
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await client.reader.readline() == first
    if path == CHAT:
        await client.reader.readline()
        client.writer.write(body)
        assert (await client.reply()).status == 200


async def test_a_client_that_sends_all_before_it_reads_gets_its_answer(server, wire):
    for _ in range(3):
        assert (await wire.post("/x", content=bytes(8 << 20))).status_code == 404
        assert (await wire.post(CHAT, content=bytes(8 << 20))).status_code == 413


async def test_a_connection_goes_on_after_answers_to_requests_that_came_whole(connect):
    client = await connect()
    for _ in range(3):
        client.question()
        assert (await client.reply()).status == 200
        assert await client.is_served()


@pytest.mark.parametrize("length", ["content-length: 100\r\n", CHUNKED])
async def test_a_body_that_does_not_come_is_408(rig, connect, length):
    client = await connect(body_seconds=SHORT)
    client.send(f"POST {CHAT}", length, b"1\r\n{\r\n")
    reply = await client.reply()

    assert reply.refusal == (408, "body_timeout", "close")
    assert await client.is_closed()
    assert rig.value("pdcluster_request_rejected_total", reason="body_timeout") == 1


def test_a_body_has_more_time_the_more_of_it_has_come():
    limits = HttpLimits(body_seconds=10, body_bytes_per_second=1000)

    assert [limits.body_deadline(size) for size in (0, 500, 4000)] == [10, 10.5, 14]


@pytest.mark.parametrize("hosts", ["", "host: x\r\nHost: y\r\n"])
async def test_a_request_without_one_host_is_refused(connect, hosts):
    client = await connect()
    client.writer.write(f"GET /health HTTP/1.1\r\n{hosts}\r\n".encode())
    reply = await client.reply()

    num = len(hosts.splitlines())
    assert (reply.status, reply.code) == (400, "not_http")
    assert f"the header has {num} fields Host: send one" in reply.body.decode()


async def test_a_body_may_say_that_it_is_not_coded(connect):
    client = await connect()
    client.send(
        f"POST {CHAT}",
        f"content-encoding: Identity\r\ncontent-length: {len(HELLO)}\r\n",
        HELLO,
    )

    assert (await client.reply()).status == 200


@pytest.mark.parametrize("begun", [b"GET /hea", b"\r\n", b"POST / HTTP/1.1\r\nhost: x\r\nx-a"])
@pytest.mark.parametrize("num_before", [0, 1])
async def test_a_header_that_does_not_come_whole_is_408(connect, begun, num_before):
    client = await connect(header_seconds=SHORT)
    for _ in range(num_before):
        assert await client.is_served()
    client.writer.write(begun)

    assert (await client.reply()).code == "header_timeout"
    assert await client.is_closed()


@pytest.mark.parametrize("num_before", [0, 1])
async def test_a_client_that_asks_nothing_is_closed_like_any_idle_one(connect, num_before):
    client = await connect(keep_alive_seconds=num_before)
    for _ in range(num_before):
        assert await client.is_served()

    assert await client.is_closed()


@pytest.mark.parametrize("begun", [b"GET /", b"GET / HTTP/1.1\r\nx-a: "])
async def test_a_header_without_an_end_ends_the_connection(connect, begun, caplog):
    caplog.set_level("INFO")
    client = await connect(max_header_bytes=10_000)
    client.writer.write(begun)

    assert await client.sends_until_closed(b"x" * 3000)
    assert "has more than 10000 bytes" in caplog.text


FIELDS = "".join(f"x-{i}: y\r\n" for i in range(40))


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ("x-a: " + "y" * 5000 + "\r\n", "has more than 5000 bytes: send less"),
        (("x-a: " + "y" * 500 + "\r\n") * 10, "has more than 5000 bytes: send less"),
        (FIELDS, "the header has more than 40 fields: send fewer"),
    ],
)
@pytest.mark.parametrize("num_before", [0, 1])
async def test_a_header_that_comes_whole_and_too_large_is_431(
    rig, connect, headers, words, num_before
):
    limits = {"max_header_bytes": 5000, "max_headers": 40}
    client = await connect(**limits)
    for _ in range(num_before):
        assert await client.is_served()
    client.post(HELLO, headers)
    reply = await client.reply()

    assert reply.refusal == (431, "header_too_large", "close")
    assert words in json.loads(reply.body)["error"]["message"]
    assert await client.is_closed()
    assert rig.backend.calls == []


async def test_a_refused_client_that_goes_on_sending_reads_its_answer(connect):
    client = await connect(linger_seconds=DEADLINE_SECONDS)
    client.writer.write(b"GET / HTTP/1.1\r\nx-a: " + bytes(b"y" * 200_000))
    client.writer.write(b"y" * 200_000)
    async with asyncio.timeout(DEADLINE_SECONDS):
        await client.writer.drain()

    assert (await client.reply()).code == "header_too_large"


async def test_a_refused_client_that_never_stops_sending_is_cut_off(connect):
    client = await connect(linger_seconds=DEADLINE_SECONDS)
    client.writer.write(b"GET / HTTP/1.1\r\nx-a: ")

    assert await client.sends_until_closed(b"y" * 100_000)


async def test_a_body_that_drips_ends_the_connection(connect):
    client = await connect(body_seconds=SHORT)
    client.send(f"POST {CHAT}", "content-length: 100000\r\n")

    assert await client.sends_until_closed(b" ")


async def test_an_offer_to_upgrade_is_ignored_and_the_body_is_read(connect):
    """As the JDK's client offers HTTP/2 with its first request."""
    client = await connect()
    offer = (
        "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: "
        "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
    )
    for body in (HELLO, b""):
        client.send(f"POST {CHAT}", offer + f"content-length: {len(HELLO)}\r\n", body)
        if not body:
            await client.writer.drain()
            client.writer.write(HELLO)
        assert (await client.reply()).status == 200
    client.send("GET /health", offer + "x-a: b\r\n")
    assert (await client.reply()).status == 200
    client.question()

    assert (await client.reply()).status == 200


async def test_a_proxy_s_connect_is_refused(connect):
    client = await connect()
    client.writer.write(b"CONNECT a.example:443 HTTP/1.1\r\nhost: a.example\r\n\r\n")

    assert (await client.reply()).status == 405
    assert await client.is_closed()


async def test_trailers_without_an_end_cut_the_connection(connect):
    client = await connect(max_header_bytes=10_000)
    client.send(f"POST {CHAT}", CHUNKED, b"1\r\n{\r\n0\r\nx-a: ")

    assert await client.sends_until_closed(b"x" * 3000)


async def test_a_body_in_the_smallest_chunks_is_no_framing_too_much(connect):
    client = await connect(max_header_bytes=2_000)
    body = json.dumps(QUESTION).encode().ljust(4000)
    client.send(f"POST {CHAT}", CHUNKED, b"".join(b"1\r\n%c\r\n" % byte for byte in body[:2000]))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await client.writer.drain()
    for byte in body[2000:]:
        client.writer.write(b"1\r\n%c\r\n" % byte)
    client.writer.write(b"0\r\n\r\n")

    assert (await client.reply()).status == 200


async def test_bodies_of_all_connections_share_one_bound(served, rig, connect):
    server = await served(max_bodies_bytes=50_000)
    clients = [await connect(server) for _ in range(20)]
    for client in clients:
        client.send(f"POST {CHAT}", "content-length: 15001\r\n", bytes(15_000))  # one byte short
    replies = {asyncio.ensure_future(client.reply()): client for client in clients}
    refused = set()
    async with asyncio.timeout(DEADLINE_SECONDS):
        while len(refused) < 17:
            done, _ = await asyncio.wait(
                set(replies) - refused, return_when=asyncio.FIRST_COMPLETED
            )
            refused |= done
    waiting = set(replies) - refused

    assert {
        (task.result().status, task.result().code, task.result().headers["retry-after"])
        for task in refused
    } == {(503, "bodies_full", "1")}
    assert len(waiting) == 3  # what they sent is what may be held
    for task in waiting:
        task.cancel()
        replies[task].writer.close()
    late = await connect(server)
    async with asyncio.timeout(DEADLINE_SECONDS):
        # until the server has seen them leave
        while (reply := await requested(late, bytes(19_000))).status == 503:
            late = await connect(server)
    assert reply.status == 400  # read, and no JSON


async def requested(client: Client, body: bytes) -> Reply:
    client.post(body)
    return await client.reply()


async def test_a_body_counts_until_its_request_has_ended_and_one_body_always_has_room(
    served, rig, connect
):
    server = await served(max_bodies_bytes=1)
    rig.backend.hold_after = 0
    first, second = await connect(server), await connect(server)
    body = json.dumps(QUESTION).encode().ljust(19_000)
    first.post(body)
    await rig.backend.holding.wait()

    assert (await requested(second, body)).code == "bodies_full"
    rig.backend.gate.set()
    assert (await first.reply()).status == 200
    assert (await requested(await connect(server), body)).status == 200


async def test_a_stream_has_no_deadline(served, rig, connect):
    limits = {"header_seconds": 0.05, "body_seconds": 0.05, "keep_alive_seconds": 1}
    server = await served(**limits)
    rig.backend.hold_after = 3
    client = await connect(server)
    client.question(stream=True)
    await rig.backend.holding.wait()
    for _ in range(3):  # each deadline passes for others meanwhile
        other = await connect(server)
        other.writer.write(b"GET /hea")
        assert await other.is_closed()
    rig.backend.gate.set()
    async with asyncio.timeout(DEADLINE_SECONDS):
        text = (await client.reader.read(-1)).decode()

    assert text.count("data: ") > 10
    assert "data: [DONE]" in text


@pytest.mark.parametrize("begun", [b"", b"GET /hea"])
async def test_a_crowd_of_silent_connections_does_not_shut_the_door(served, connect, begun):
    server = await served(max_connections=3, spare_connections=0)
    open_connections = []
    for _ in range(12):
        open_connections.append(await connect(server))
        open_connections[-1].writer.write(begun)
    client = await connect(server)
    client.question()

    assert (await client.reply()).status == 200
    for silent in open_connections[:-3]:
        assert await silent.is_closed()


@pytest.mark.parametrize(
    ("start", "keys", "status"),
    [
        (f"POST {CHAT}", True, 401),
        ("POST /x", False, 404),
        ("POST /health", False, 405),
        ("GET /health", False, 200),
        (f"POST {CHAT}", False, 413),
        ("POST /v1/nothing", False, 404),
    ],
)
async def test_a_crowd_that_has_its_answers_and_goes_on_sending_does_not_shut_the_door(
    served, connect, start, keys, status
):
    options = {"tenant_of": lambda key: None} if keys else {}
    limits = {"max_connections": 3, "spare_connections": 2, "linger_seconds": DEADLINE_SECONDS}
    server = await served(**options, **limits)
    for _ in range(3):
        for _ in range(5):
            stranger = await connect(server)
            stranger.send(start, HUGE)
            assert (await stranger.reply()).status == status
        probe = await connect(server)
        assert await probe.is_served()


async def test_a_crowd_that_is_answered_503_and_goes_on_sending_does_not_shut_the_door(
    served, rig, connect
):
    server = await served(max_connections=1, spare_connections=2, linger_seconds=DEADLINE_SECONDS)
    rig.backend.hold_after = 0
    running = await connect(server)
    running.question()
    await rig.backend.holding.wait()
    for _ in range(3):
        for _ in range(2):
            stranger = await connect(server)
            stranger.send(f"POST {CHAT}", HUGE)
            assert (await stranger.reply()).code == "connections_full"
        probe = await connect(server)
        assert await probe.is_served()
    rig.backend.gate.set()
    assert (await running.reply()).status == 200


async def test_a_body_refused_half_way_counts_no_longer_while_its_client_goes_on_sending(
    served, connect
):
    server = await served(max_bodies_bytes=1, linger_seconds=DEADLINE_SECONDS)
    client = await connect(server)
    client.send(f"POST {CHAT}", CHUNKED, b"3a98\r\n" + bytes(15_000) + b"\r\n")
    async with asyncio.timeout(DEADLINE_SECONDS):
        # until it is held
        while (reply := await requested(await connect(server), bytes(19_000))).status != 503:
            assert reply.status == 400
    client.writer.write(b"5000\r\n" + bytes(0x5000) + b"\r\n")
    assert (await client.reply()).code == "body_too_large"

    assert (
        await requested(await connect(server), bytes(19_000))
    ).status == 400  # read, and no JSON


async def test_the_policy_s_bound_on_a_body_is_read_again(served, rig, connect):
    server = await served()
    rig.policy = PolicyConfig(admission=AdmissionSpec(max_body_bytes=10))

    assert (await requested(await connect(server), bytes(11))).code == "body_too_large"
