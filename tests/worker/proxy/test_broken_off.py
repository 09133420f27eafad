"""Relayed answers that break off: their worker is lost, or their router has no time left."""

import asyncio
import json

import pytest

from pdcluster_worker.errors import RequestError
from tests.worker.proxy.rig import CHAT, Client, Rig, post

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STOPPED = RequestError("no time left", status=503, code="draining")
LAST_CHUNK = b"0\r\n\r\n"
OPENAI = {"message": "no time left", "type": "server_error", "param": None, "code": "draining"}
LOST = "the worker of this answer broke off: send it again"


def chunk(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


EVENT = chunk(b'data: {"n": 1}\n\n')


async def begun(rig: Rig, came: bytes, path: str = CHAT) -> Client:
    """A client that has got these bytes from worker b, and the worker has not ended."""
    rig.stand(rig.workers[0], takes=False)
    rig.workers[1].script = lambda writer: writer.write(came)
    client = await rig.ask(post(b'{"a": 1}', path))
    async with asyncio.timeout(20):
        assert await client.reader.readexactly(len(came)) == came
    return client


def event_of(rest: bytes) -> bytes:
    """The only chunk before the end of an answer."""
    size, _, chunked = rest.partition(b"\r\n")
    event, end = chunked[: int(size, 16)], chunked[int(size, 16) :]
    assert end == b"\r\n" + LAST_CHUNK
    return event


def error_in(event: bytes, begin: bytes = b"data: ") -> object:
    assert event.startswith(begin)
    assert event.endswith(b"\n\n")
    return json.loads(event.removeprefix(begin))["error"]


async def test_a_stream_ends_with_the_error_after_its_event(rig: Rig) -> None:
    client = await begun(rig, HEAD + EVENT)

    assert rig.relay.end_answers(STOPPED) == 1

    assert error_in(event_of(await client.rest())) == OPENAI
    await asyncio.wait_for(rig.workers[1].gone.wait(), 20)  # it need not go on
    assert rig.value("relayed_requests_total", outcome="cut") == 1
    assert rig.relay.num_open == 0


async def test_the_error_of_a_message_is_a_named_event(rig: Rig) -> None:
    client = await begun(rig, HEAD + EVENT, "/v1/messages")

    rig.relay.end_answers(STOPPED)

    error = error_in(event_of(await client.rest()), b"event: error\ndata: ")
    assert error == {"type": "overloaded_error", "message": "no time left"}


@pytest.mark.parametrize("cut", [1, 2, 3, 9])
async def test_half_an_event_is_whole_before_the_error(rig: Rig, cut: int) -> None:
    client = await begun(rig, HEAD + EVENT[:-cut])

    assert rig.relay.end_answers(STOPPED) == 1
    rig.workers[1].writer.write(EVENT[-cut:])

    rest = await client.rest()
    assert rest.startswith(EVENT[-cut:])
    assert error_in(event_of(rest[cut:])) == OPENAI


async def test_an_answer_that_ends_by_itself_meanwhile_has_no_error(rig: Rig) -> None:
    client = await begun(rig, HEAD + EVENT[:-3])
    rig.is_draining = True

    assert rig.relay.end_answers(STOPPED) == 1
    rig.workers[1].writer.write(EVENT[-3:] + LAST_CHUNK)

    async with asyncio.timeout(20):
        assert await client.reader.readexactly(3 + len(LAST_CHUNK)) == EVENT[-3:] + LAST_CHUNK
    assert rig.value("relayed_requests_total", outcome="answered") == 1


async def test_what_has_not_begun_is_the_routers_own(rig: Rig) -> None:
    worker = rig.workers[1]
    rig.stand(rig.workers[0], takes=False)
    worker.script = lambda writer: None
    client = await rig.ask()
    await rig.until(lambda: len(worker.requests) == 1)

    assert rig.relay.end_answers(STOPPED) == 1

    assert json.loads((await client.answer())[1]) == {"own": CHAT}
    assert rig.own == [("POST", CHAT, b'{"a": 1}')]
    await asyncio.wait_for(worker.gone.wait(), 20)


async def test_a_connection_that_waits_for_a_request_has_nothing_to_end(rig: Rig) -> None:
    client = await rig.connect()
    await client.send(post())

    assert rig.relay.end_answers(STOPPED) == 0

    assert (await client.send(post()))[1] in {b"a", b"b"}


async def test_a_stream_of_a_worker_that_is_lost_ends_with_an_error(rig: Rig) -> None:
    client = await begun(rig, HEAD + EVENT)

    rig.workers[1].drop()

    error = error_in(event_of(await client.rest()))
    assert error == OPENAI | {"message": LOST, "code": "decode_worker_lost"}


async def test_half_an_event_of_a_worker_that_is_lost_is_cut(rig: Rig) -> None:
    client = await begun(rig, HEAD + EVENT[:-3])

    rig.workers[1].drop()

    assert await client.rest() == b""
