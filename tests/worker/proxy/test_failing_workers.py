"""Acts of a relaying router when a worker fails a request: before its answer begins, after it,
and where none is left.
"""

import asyncio
import json

import pytest

from tests.worker.proxy.rig import CHAT, FakeWorker, Rig, post, whole

REFUSAL = json.dumps({"error": {"message": "m", "code": "draining"}}).encode()


def say(answer: bytes, *, closes: bool = False):
    def script(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        if closes:
            writer.close()

    return script


async def answered_by(rig: Rig) -> bytes:
    return (await rig.send())[1]


async def test_a_worker_that_is_not_there_is_left_out(rig: Rig) -> None:
    await rig.workers[1].stop()
    assert await answered_by(rig) == b"a"
    assert rig.value("relay_retries_total", reason="connect") == 1


async def test_a_worker_that_is_killed_before_its_answer_is_replaced(rig: Rig) -> None:
    rig.workers[1].script = lambda writer: writer.transport.abort()
    assert await answered_by(rig) == b"a"
    assert rig.value("relay_retries_total", reason="lost") == 1
    assert [len(worker.requests) for worker in rig.workers] == [1, 1]


async def test_a_kept_connection_that_had_ended_is_opened_again(rig: Rig) -> None:
    await answered_by(rig)
    rig.stand(rig.workers[0], takes=False)
    worker = rig.workers[1]
    worker.script = lambda writer: (worker.drop(), setattr(worker, "script", worker.say_name))

    assert await answered_by(rig) == b"b"
    assert rig.value("relay_retries_total", reason="stale") == 1
    assert worker.num_connections == 2


async def test_a_request_that_ends_each_connection_is_tried_at_one_kept_and_one_new(
    rig: Rig,
) -> None:
    rig.stand(rig.workers[0], takes=False)
    worker, held = rig.workers[1], []
    worker.script = held.append
    requested = [asyncio.create_task(rig.send()) for _ in range(4)]
    await rig.until(lambda: len(held) == 4)
    for writer in held:
        worker.say_name(writer)
    await asyncio.gather(*requested)
    worker.script = lambda writer: writer.transport.abort()

    assert json.loads(await answered_by(rig)) == {"own": CHAT}
    assert len(worker.requests) == 4 + 2
    assert rig.value("relay_retries_total", reason="stale") == 1


async def test_a_worker_that_is_lost_while_it_is_connected_to_gets_no_request(rig: Rig) -> None:
    worker = rig.workers[1]
    worker.script = lambda writer: None
    client = await rig.ask()
    async with asyncio.timeout(20):
        while not rig.relay.num_open:
            await asyncio.sleep(0)
    rig.lose(worker)

    assert (await client.answer())[1] == b"a"
    assert (worker.requests, rig.relay.num_open) == ([], 0)


@pytest.mark.parametrize("code", [b"draining", b"not_ready"])
async def test_a_refusal_of_a_worker_that_goes_is_not_passed_on(rig: Rig, code: bytes) -> None:
    answer = whole(REFUSAL.replace(b"draining", code), "503 Service Unavailable")
    half = len(answer) - 9

    def in_pieces(writer: asyncio.StreamWriter) -> None:
        writer.write(answer[:20])
        asyncio.get_running_loop().call_later(0.01, writer.write, answer[20:half])
        asyncio.get_running_loop().call_later(0.02, writer.write, answer[half:])

    rig.workers[1].script = in_pieces
    assert await answered_by(rig) == b"a"
    assert rig.value("relay_retries_total", reason="draining") == 1


async def test_any_other_refusal_is_passed_on(rig: Rig) -> None:
    full = whole(REFUSAL.replace(b"draining", b"queue_full"), "503 Service Unavailable")
    rig.workers[1].script = say(full)
    head, body = await rig.send()
    assert head + body == full


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + whole(b"x"),
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        whole(b"x") + whole(b"of no request"),
        whole(b"x") + b"HTTP/1.1 2",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
    ],
)
async def test_an_answer_that_is_none_is_not_passed_on(rig: Rig, answer: bytes) -> None:
    rig.workers[1].script = say(answer)
    assert await answered_by(rig) == b"a"
    assert rig.value("relay_retries_total", reason="not_http") == 1


async def test_an_answer_that_breaks_off_ends_with_its_connection(rig: Rig) -> None:
    begun = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"
    rig.workers[1].script = say(begun, closes=True)
    client = await rig.ask(post() + post())

    assert await client.rest() == begun
    assert rig.value("relayed_requests_total", outcome="cut") == 1
    assert [len(worker.requests) for worker in rig.workers] == [0, 1]


async def test_a_cut_connection_takes_no_further_request_when_its_bytes_are_read(rig: Rig) -> None:
    worker = rig.workers[1]
    worker.script = say(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n" + bytes(32 << 20))
    client = await rig.connect()
    client.writer.transport.pause_reading()
    client.writer.write(post() + post())
    await rig.until(lambda: bool(worker.requests))
    (connection,) = rig.relay.fronts
    await rig.until(lambda: bool(connection.transport.get_write_buffer_size()))

    rig.lose(worker)
    client.writer.transport.resume_reading()
    assert (await client.rest()).count(b"HTTP/1.1") == 1
    assert rig.value("relayed_requests_total", outcome="cut") == 1
    assert rig.value("relayed_requests_total", outcome="client_gone") == 0


async def test_more_than_an_answer_that_has_begun_ends_with_its_connection(rig: Rig) -> None:
    begun = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"
    rig.workers[1].script = say(begun)
    client = await rig.ask()
    await client.reader.readexactly(len(begun))
    rig.workers[1].writer.write(b"other" + whole(b"of no request"))
    assert await client.rest() == b""


async def test_what_no_worker_takes_the_router_serves_itself(rig: Rig) -> None:
    for worker in rig.workers:
        worker.script = lambda writer: writer.transport.abort()
    client = await rig.connect()
    head, body = await client.send(post(b'{"mine": 1}'))

    assert json.loads(body) == {"own": CHAT}
    assert rig.own == [("POST", CHAT, b'{"mine": 1}')]
    assert b"connection: close" in head
    assert await client.rest() == b""
    assert rig.value("relayed_requests_total", outcome="not_taken") == 1
    assert rig.relay.num_open == 0


async def test_tries_are_bounded(rig: Rig) -> None:
    rig.set_policy(max_retries=0, policy="roundRobin")
    rig.workers[1].script = lambda writer: writer.transport.abort()
    await answered_by(rig)

    assert [len(worker.requests) for worker in rig.workers] == [0, 1]
    assert len(rig.own) == 1


async def test_without_workers_the_router_serves_itself(rig: Rig) -> None:
    for worker in rig.workers:
        rig.stand(worker, takes=False)
    assert await answered_by(rig) == json.dumps({"own": CHAT}).encode()
    assert rig.value("unrelayed_requests_total", reason="worker") == 1


async def test_a_draining_worker_ends_its_answers_and_gets_no_more(rig: Rig) -> None:
    worker = rig.workers[1]
    worker.script = lambda writer: None
    client = await rig.ask()
    await rig.until(lambda: bool(worker.requests))
    rig.stand(worker, takes=False)

    assert [await answered_by(rig) for _ in range(3)] == [b"a"] * 3
    worker.writer.write(whole(b"late"))
    assert (await client.answer())[1] == b"late"


async def test_another_engine_of_a_pod_is_another_worker(rig: Rig) -> None:
    await answered_by(rig)
    other = FakeWorker("b2")
    await other.start()
    rig.workers.append(other)
    rig.lose(rig.workers[1])
    await asyncio.wait_for(rig.workers[1].gone.wait(), 20)
    rig.standing["b2"] = rig.standing["a"].__class__("b2", "b", f"127.0.0.1:{other.port}", True, 0)
    rig.relay.poll()

    assert {await answered_by(rig) for _ in range(4)} == {b"a", b"b2"}
