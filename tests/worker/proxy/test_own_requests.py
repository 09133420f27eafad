"""Requests that a relaying router does not relay: its own server answers, workers see nothing."""

import asyncio
import contextlib
import json
import socket

import pytest

from pdcluster_worker.proxy import client_connection, reverse_proxy
from pdcluster_worker.server.http.limits import HttpLimits
from tests.worker.proxy.rig import CHAT, Rig, post

OWN = json.dumps({"own": CHAT}).encode()


def nothing_relayed(rig: Rig) -> bool:
    return not any(worker.requests for worker in rig.workers)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", "route"),
        (post(path="/v1/responses"), "route"),
        (post(path=f"{CHAT}?a=1"), "route"),
        (post(path=f"http://worker{CHAT}"), "route"),
        (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\n\r\n",
            "form",
        ),
        (post(b"{}", CHAT, "Upgrade: h2c", "Connection: Upgrade"), "form"),
        (post(b"{}", CHAT).replace(b"HTTP/1.1", b"HTTP/1.0"), "form"),
        (post().replace(b"Bearer k", b"Bearer wrong"), "key"),
        (post().replace(b"Authorization: Bearer k\r\n", b""), "key"),
    ],
)
async def test_router_serves_itself(rig: Rig, request_: bytes, reason: str) -> None:
    client = await rig.connect()
    assert b'"own"' in (await client.send(request_))[1]
    assert (await client.rest(), nothing_relayed(rig)) == (b"", True)
    assert rig.value("unrelayed_requests_total", reason=reason) == 1
    assert (await rig.send())[1] in (b"a", b"b")


async def test_limits_of_size_are_those_of_the_routers_server(rig: Rig) -> None:
    fields = (f"x{number}: y" for number in range(14))
    assert (await rig.send(post(b"{}", CHAT, *fields)))[0].startswith(b"HTTP/1.1 431")
    assert (await rig.send(post(b"x" * (1 << 20) + b"x")))[1] == OWN
    assert nothing_relayed(rig)
    assert rig.value("unrelayed_requests_total", reason="size") == 2


async def test_expectation_is_met_by_the_router(rig: Rig) -> None:
    client = await rig.connect()
    head, _, body = post(b"{}", CHAT, "Expect: 100-continue").partition(b"\r\n\r\n")
    client.writer.write(head + b"\r\n\r\n")
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert (await client.send(body))[1] == OWN
    assert nothing_relayed(rig)


@pytest.mark.parametrize(
    "request_",
    [
        post(b"{}", CHAT, "Content-Length: 2"),
        post(b"{}", CHAT, "Transfer-Encoding: chunked"),
        post(b"{}", CHAT, "X: a", " folded"),
        post().replace(b"\r\n", b"\n"),
        post(b"{}", CHAT, "X: a\nY: b"),
        post(b"{}", CHAT, "X: a\0b"),
        b"CONNECT worker:8000 HTTP/1.1\r\nhost: worker\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_what_might_be_two_requests_is_refused_and_not_relayed(
    rig: Rig, request_: bytes
) -> None:
    client = await rig.ask(request_)
    answer = await client.rest()

    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 405"))
    assert b"connection: close" in answer
    assert (nothing_relayed(rig), rig.own) == (True, [])


async def test_a_second_request_that_is_not_plain_follows_the_answer_of_the_first(
    rig: Rig,
) -> None:
    client = await rig.ask(post() + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await client.answer())[1] == b"b"
    assert json.loads((await client.answer())[1]) == {"own": "/health"}
    assert await client.rest() == b""


@pytest.mark.parametrize("cut", [20, 150])
async def test_a_slow_request_is_the_routers_own(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    monkeypatch.setattr(client_connection, "SLOW_SECONDS", 0.0)
    client = await rig.connect()
    request = post(b'{"a": "' + b"x" * 100 + b'"}')
    client.writer.write(request[:cut])
    await rig.until(lambda: not rig.relay.fronts)

    assert (await client.send(request[cut:]))[1] == OWN
    assert rig.value("unrelayed_requests_total", reason="slow") == 1
    assert nothing_relayed(rig)


async def test_an_endless_head_is_refused(rig: Rig) -> None:
    client = await rig.ask(b"POST /v1/chat/completions HTTP/1.1\r\nx: " + b"y" * 5000)
    await rig.until(lambda: rig.value("unrelayed_requests_total", reason="size") == 1)
    client.writer.write(b"y" * 5000)
    assert (await client.answer())[0].startswith(b"HTTP/1.1 431")


async def test_bodies_together_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reverse_proxy, "limits_of", lambda _: HttpLimits(max_bodies_bytes=10))
    rig.relay.take_policy()
    rig.workers[1].script = lambda writer: None
    waiting = await rig.ask(post(b"12345678"))
    await rig.until(lambda: bool(rig.workers[1].requests))

    assert (await rig.send(post(b"123")))[1] == OWN
    waiting.writer.close()
    await rig.until(lambda: len(rig.relay.fronts) == 0)
    assert (await rig.send(post(b"123")))[1] == b"a"


async def test_while_relaying_is_off_the_router_serves_itself_and_keeps_connections(
    rig: Rig,
) -> None:
    client = await rig.connect()
    assert (await client.send(post()))[1] == b"b"
    rig.set_policy(enabled=False)
    assert [(await client.send(post()))[1] for _ in range(2)] == [OWN, OWN]
    assert rig.value("unrelayed_requests_total", reason="route") == 0

    rig.set_policy(policy="roundRobin")
    assert (await rig.send())[1] == b"a"


def limit(rig: Rig, monkeypatch: pytest.MonkeyPatch, most: int, spare: int) -> None:
    """Let so many requests be open, and so many connections beside them."""
    limits = HttpLimits(max_connections=most, spare_connections=spare)
    monkeypatch.setattr(reverse_proxy, "limits_of", lambda _: limits)
    rig.relay.take_policy()


async def test_a_new_connection_takes_the_place_of_the_one_that_waits_longest(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(rig, monkeypatch, 1, 1)
    first = await rig.connect()
    await first.send(post())
    second = await rig.connect()
    await second.send(post())
    third = await rig.connect()

    assert (await third.send(post()))[1] == b"b"
    assert await first.rest() == b""
    assert (await second.send(post()))[1] == b"a"


async def test_a_request_on_its_way_in_keeps_its_place(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "SLOW_SECONDS", 30.0)
    limit(rig, monkeypatch, 1, 1)
    idle, coming = await rig.connect(), await rig.connect()
    await idle.send(post())
    request = post(b"12345678")
    coming.writer.write(request[:-4])
    await rig.until(lambda: any(not each.is_waiting for each in rig.relay.fronts))
    await rig.connect()

    assert await idle.rest() == b""
    assert (await coming.send(request[-4:]))[1] == b"a"


async def test_connections_that_come_at_once_are_bounded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(rig, monkeypatch, 1, 1)
    address = ("127.0.0.1", rig.http.port)
    with contextlib.ExitStack() as stack:
        for _ in range(10):  # the router's loop is this one, which waits meanwhile
            stack.enter_context(socket.create_connection(address))
        last = await rig.connect()
        assert (await last.send(post()))[1] == b"b"
        assert len(rig.relay.fronts) <= 2


async def test_requests_leave_the_places_of_probes_free(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(rig, monkeypatch, 2, 1)
    for worker in rig.workers:
        worker.script = lambda writer: None
    busy = [await rig.connect() for _ in range(2)]
    for client in busy:
        client.writer.write(post())
    await rig.until(lambda: rig.relay.num_open == 2)

    assert (await rig.send())[1] == OWN
    assert rig.value("unrelayed_requests_total", reason="crowd") == 1
    probe = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    assert json.loads((await rig.send(probe))[1]) == {"own": "/health"}
    for worker in rig.workers:
        worker.script = worker.say_name
        worker.say_name(worker.writer)
    assert {(await client.answer())[1] for client in busy} == {b"a", b"b"}
    assert (await busy[0].send(post()))[1] != OWN


async def test_a_connection_without_a_request_holds_no_drain(rig: Rig) -> None:
    await rig.connect()
    await rig.until(lambda: len(rig.relay.fronts) == 1)
    assert (rig.http.num_answering, await rig.http.unacked()) == (0, frozenset())
    await asyncio.sleep(0)
