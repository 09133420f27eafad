"""Requests at a worker that loses its gRPC connection to a relaying router, or is gone."""

import asyncio
import socket

from tests.worker.proxy.rig import Client, Rig, post

BEGUN = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"


async def begun(rig: Rig) -> Client:
    """A client whose answer from worker b has begun."""
    rig.workers[1].script = lambda writer: writer.write(BEGUN)
    client = await rig.ask()
    await client.reader.readexactly(len(BEGUN))
    return client


async def waiting(rig: Rig) -> Client:
    """A client whose request worker b does not answer yet."""
    worker = rig.workers[1]
    worker.script = lambda writer: None
    client, before = await rig.connect(), len(worker.requests)
    client.writer.write(post())
    await rig.until(lambda: len(worker.requests) > before)
    return client


async def test_an_answer_that_has_begun_outlives_a_break_of_grpc(rig: Rig) -> None:
    worker = rig.workers[1]
    client = await begun(rig)
    rig.stand(worker, takes=False, is_connected=False)
    assert [(await rig.send())[1] for _ in range(2)] == [b"a"] * 2

    worker.writer.write(b" done")
    async with asyncio.timeout(20):
        assert await client.reader.readexactly(5) == b" done"
    assert rig.value("relayed_requests_total", outcome="cut") == 0
    assert rig.relay.num_open == 0


async def test_a_request_without_a_byte_of_an_answer_goes_elsewhere_at_a_break_of_grpc(
    rig: Rig,
) -> None:
    client = await waiting(rig)
    rig.stand(rig.workers[1], takes=False, is_connected=False)

    assert (await client.answer())[1] == b"a"
    await asyncio.wait_for(rig.workers[1].gone.wait(), 20)
    assert rig.value("relay_retries_total", reason="lost") == 1


async def test_it_stays_where_there_is_no_other_worker(rig: Rig) -> None:
    worker = rig.workers[1]
    rig.stand(rig.workers[0], takes=False)
    client = await waiting(rig)
    rig.stand(worker, takes=False, is_connected=False)
    worker.say_name(worker.writer)

    assert (await client.answer())[1] == b"b"
    assert rig.own == []


async def test_no_connection_is_kept_over_a_break_of_grpc_and_requests_come_again(
    rig: Rig,
) -> None:
    worker = rig.workers[1]
    await rig.send()
    rig.stand(worker, takes=False, is_connected=False)
    await asyncio.wait_for(worker.gone.wait(), 20)
    rig.stand(worker, takes=True, is_connected=True)

    assert {(await rig.send())[1] for _ in range(2)} == {b"a", b"b"}
    assert worker.num_connections == 2


async def test_an_answer_of_a_worker_that_has_drained_is_read_to_its_end(rig: Rig) -> None:
    worker = rig.workers[1]
    client = await begun(rig)
    rig.stand(worker, takes=False, has_drained=True)
    rig.lose(worker)

    worker.writer.write(b" done")
    async with asyncio.timeout(20):
        assert await client.reader.readexactly(5) == b" done"
    await asyncio.wait_for(worker.gone.wait(), 20)


async def test_workers_that_go_at_once_get_none_of_each_others_requests(rig: Rig) -> None:
    client = await waiting(rig)
    rig.standing.clear()
    rig.relay.poll()

    assert (await client.answer())[1].startswith(b'{"own"')
    assert rig.workers[0].requests == []


async def test_a_host_that_acknowledges_nothing_is_given_up(rig: Rig) -> None:
    await rig.send()
    (upstream,) = (upstream for pool in rig.relay.pools for upstream in pool.idle)
    connection = upstream._transport.get_extra_info("socket")
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
