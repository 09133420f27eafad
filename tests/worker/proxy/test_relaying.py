"""A relaying router between real sockets: the way of a request and of its answer."""

import asyncio

import pytest

from pdcluster_worker.proxy import client_connection
from pdcluster_worker.server.http.raw_http import INTERIM
from pdcluster_worker.server.http.run import serve
from tests.worker.proxy.rig import CHAT, Client, Rig, post, whole

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def test_bytes_of_a_request_and_its_answer_are_passed_on(rig: Rig) -> None:
    answer = whole(b'{"x":1}', "200 OK", "X-Request-Id: w1", "x-pdcluster-route: why")
    for worker in rig.workers:
        worker.script = lambda writer: writer.write(answer)
    head, body = await rig.send(post(b'{"prompt": "\xc3\xa9"}', CHAT, "X-A: 1"))

    assert head + body == answer
    (got,) = rig.workers[0].requests + rig.workers[1].requests
    assert got == (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: api\r\nAuthorization: Bearer k\r\nX-A: 1\r\n"
        b"x-forwarded-for: 127.0.0.1\r\nx-forwarded-proto: http\r\ncontent-length: 16\r\n\r\n"
        b'{"prompt": "\xc3\xa9"}'
    )
    await rig.until(lambda: rig.value("relayed_requests_total", outcome="answered") == 1)
    assert (rig.relay.num_open, rig.own) == (0, [])


async def test_a_client_by_ipv6_is_named_by_its_bare_address(rig: Rig) -> None:
    http = await serve(
        lambda *_: None,
        "::1",
        0,
        front=lambda ordinary: client_connection.proxy_protocol(rig.relay, ordinary),
    )
    client = Client(*await asyncio.open_connection("::1", http.port))
    await client.send(post())
    client.writer.close()
    await http.close()
    assert b"\r\nx-forwarded-for: ::1\r\n" in rig.workers[1].requests[0]


async def test_connections_are_kept_on_both_sides_and_workers_take_turns(rig: Rig) -> None:
    client = await rig.connect()
    answers = [(await client.send(post()))[1] for _ in range(6)]

    assert answers == [b"b", b"a", b"b", b"a", b"b", b"a"]
    assert [worker.num_connections for worker in rig.workers] == [1, 1]


async def test_a_stream_is_passed_on_as_it_comes(rig: Rig) -> None:
    worker = rig.workers[1]
    worker.script = lambda writer: writer.write(CHUNKED + chunk(b"one"))
    client = await rig.ask()
    assert await client.reader.readexactly(len(CHUNKED) + 8) == CHUNKED + chunk(b"one")

    worker.writer.write(chunk(b"two")[:4])
    assert await client.reader.readexactly(4) == chunk(b"two")[:4]
    worker.writer.write(chunk(b"two")[4:] + END)
    assert await client.reader.readexactly(4 + len(END)) == chunk(b"two")[4:] + END
    assert (await client.send(post()))[1] == b"a"


async def test_a_request_may_come_byte_by_byte(rig: Rig) -> None:
    client = await rig.connect()
    for byte in post(b'{"a": 12345}'):
        client.writer.write(bytes([byte]))
        await client.writer.drain()
        await asyncio.sleep(0)
    assert (await client.answer())[1] == b"b"
    assert rig.workers[1].requests[0].endswith(b'{"a": 12345}')


async def test_requests_that_come_early_are_answered_in_turn(rig: Rig) -> None:
    client = await rig.ask(post() + post() + post()[:30])
    assert [(await client.answer())[1] for _ in range(2)] == [b"b", b"a"]
    client.writer.write(post()[30:])
    assert (await client.answer())[1] == b"b"


async def test_a_client_that_sends_ahead_without_end_has_to_wait(rig: Rig) -> None:
    rig.workers[1].script = lambda writer: None
    client = await rig.ask()
    await rig.until(lambda: bool(rig.workers[1].requests))
    client.writer.write(post(b'"' + b"x" * 500_000 + b'"') * 20)
    (connection,) = rig.relay.fronts
    await rig.until(lambda: not connection.transport.is_reading())

    rig.workers[1].writer.write(whole(b"late"))
    rig.workers[1].script = rig.workers[1].say_name
    answers = [(await client.answer())[1] for _ in range(21)]
    assert answers == [b"late"] + [b"a", b"b"] * 10


async def test_a_client_that_leaves_ends_its_request_at_the_worker(rig: Rig) -> None:
    worker = rig.workers[1]
    worker.script = lambda writer: writer.write(CHUNKED + chunk(b"one"))
    client = await rig.ask()
    await client.reader.readexactly(10)
    client.writer.close()

    await asyncio.wait_for(worker.gone.wait(), 20)
    await rig.until(lambda: rig.value("relayed_requests_total", outcome="client_gone") == 1)
    assert rig.relay.num_open == 0


async def test_a_client_that_only_ends_its_sending_side_is_answered(rig: Rig) -> None:
    worker = rig.workers[1]
    worker.script = lambda writer: None
    client = await rig.ask()
    client.writer.write_eof()
    assert await client.reader.readexactly(len(INTERIM)) == INTERIM

    await rig.until(lambda: bool(worker.requests))
    worker.writer.write(whole(b"late"))
    answer = await client.reader.read()
    assert answer.replace(INTERIM, b"").startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"late")


async def test_a_client_that_leaves_before_the_connection_is_there_is_forgotten(rig: Rig) -> None:
    client = await rig.ask()
    client.writer.transport.abort()
    await rig.until(lambda: not rig.relay.fronts)
    assert rig.relay.num_open == 0


async def test_a_slow_reader_holds_back_the_worker(rig: Rig) -> None:
    worker = rig.workers[1]
    size = 64 << 20
    worker.script = lambda writer: writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
    )
    client = await rig.ask()
    await client.reader.readuntil(b"\r\n\r\n")
    client.writer.transport.pause_reading()
    for _ in range(size >> 20):
        worker.writer.write(bytes(1 << 20))
    (connection,) = rig.relay.fronts
    await rig.until(lambda: bool(connection.transport.get_write_buffer_size()))
    held = connection.transport.get_write_buffer_size()
    await asyncio.sleep(0.2)
    assert connection.transport.get_write_buffer_size() == held < 2 << 20
    assert worker.writer.transport.get_write_buffer_size() > 0

    client.writer.transport.resume_reading()
    async with asyncio.timeout(20):
        assert len(await client.reader.readexactly(size)) == size
    assert (await client.send(post()))[1] == b"a"


async def test_a_client_that_stops_reading_is_cut_off(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "SEND_SECONDS", 0.01)
    worker = rig.workers[1]
    worker.script = lambda writer: writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n" + bytes(32 << 20)
    )
    client = await rig.connect()
    client.writer.transport.pause_reading()
    client.writer.write(post())

    await asyncio.wait_for(worker.gone.wait(), 20)
    assert rig.relay.num_open == 0


async def test_a_client_that_leaves_a_little_unread_is_cut_off_too(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "SEND_SECONDS", 0.01)
    worker = rig.workers[1]
    worker.script = lambda writer: writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n"
    )
    client = await rig.ask()
    await client.reader.readuntil(b"\r\n\r\n")
    client.writer.transport.pause_reading()
    (connection,) = rig.relay.fronts
    async with asyncio.timeout(20):
        while not worker.gone.is_set():
            if not connection.transport.get_write_buffer_size():
                worker.writer.write(bytes(8192))
            await asyncio.sleep(0.001)
    assert rig.relay.num_open == 0


@pytest.mark.parametrize("said", ["Connection: close", "connection:close", "CONNECTION: Close"])
async def test_a_worker_that_ends_its_connection_ends_not_the_clients(rig: Rig, said: str) -> None:
    for worker in rig.workers:
        worker.script = lambda writer: writer.write(whole(b"x", "200 OK", said, "a: b"))
    client = await rig.connect()
    answers = [await client.send(post()) for _ in range(4)]

    assert {head for head, _ in answers} == {
        b"HTTP/1.1 200 OK\r\na: b\r\ncontent-length: 1\r\n\r\n"
    }
    assert [worker.num_connections for worker in rig.workers] == [2, 2]


async def test_a_client_that_wants_to_end_its_connection_gets_connection_close(rig: Rig) -> None:
    client = await rig.connect()
    head, body = await client.send(post(b"{}", CHAT, "Connection: close"))

    assert b"\r\nconnection: close\r\n" in head
    assert (body, await client.rest()) == (b"b", b"")
    assert (await rig.send())[1] == b"a"
    assert [worker.num_connections for worker in rig.workers] == [1, 1]


async def test_an_answer_without_a_length_ends_with_its_connection(rig: Rig) -> None:
    worker = rig.workers[1]

    def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        writer.close()

    worker.script = answer
    client = await rig.ask()
    assert await client.rest() == b"HTTP/1.1 200 OK\r\n\r\nall of it"


async def test_what_comes_unasked_ends_the_connection(rig: Rig) -> None:
    worker = rig.workers[1]
    assert (await rig.send())[1] == b"b"
    worker.writer.write(whole(b"unasked"))
    await asyncio.wait_for(worker.gone.wait(), 20)
    client = await rig.connect()
    assert [(await client.send(post()))[1] for _ in range(2)] == [b"a", b"b"]


async def test_a_draining_router_has_each_client_come_again(rig: Rig) -> None:
    rig.is_draining = True
    client = await rig.connect()
    head, body = await client.send(post())

    assert b"connection: close" in head
    assert (body, await client.rest()) == (b"b", b"")


async def test_a_router_that_ends_lets_its_answers_end(rig: Rig) -> None:
    worker = rig.workers[1]
    worker.script = lambda writer: writer.write(CHUNKED)
    idle, busy = await rig.connect(), await rig.connect()
    busy.writer.write(post())
    await busy.reader.readexactly(len(CHUNKED))
    assert rig.http.num_answering == 1

    rig.http.refuse()
    assert await idle.rest() == b""
    assert not await rig.http.has_finished(0.3)
    worker.writer.write(chunk(b"end") + END)
    assert await busy.rest() == chunk(b"end") + END
    assert await rig.http.has_finished(20)


async def test_idle_connections_end_after_their_time(rig: Rig) -> None:
    client = await rig.connect()
    await client.send(post())
    (connection,) = rig.relay.fronts
    connection.deadline = 0.0
    assert await client.rest() == b""
    for pool in rig.relay.pools:
        pool.close_idle(rig.relay.now() + 1)
    await asyncio.wait_for(rig.workers[1].gone.wait(), 20)
