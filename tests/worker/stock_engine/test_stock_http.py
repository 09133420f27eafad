"""Bodies of a stock engine's answers, as they come."""

import asyncio

import pytest

from pdcluster_worker.stock_engine.http import HttpFailedError, StockClient
from tests.worker.stock_engine.fake_vllm import Call, FakeVllm, fake_vllm


async def begun(fake: FakeVllm) -> Call:
    call = await asyncio.wait_for(fake.calls.get(), 10)
    await call.begin()
    return call


async def test_parts_that_came_before_and_later_are_taken_in_order() -> None:
    taken: list[bytes] = []
    async with fake_vllm() as fake:
        calling = asyncio.create_task(begun(fake))
        async with StockClient(fake.port).request("POST", "/", b"{}") as answer:
            call = await calling
            await call.send(b"one")
            await answer.wait_for_body()
            following = asyncio.create_task(answer.follow(taken.append))
            await call.send(b"two")
            await call.end()
            await asyncio.wait_for(following, 10)

    assert b"".join(taken) == b"onetwo"


async def test_an_error_of_the_reader_ends_the_request_and_later_parts_are_dropped() -> None:
    taken: list[bytes] = []

    def take(part: bytes) -> None:
        taken.append(part)
        raise ValueError("unreadable")

    async with fake_vllm() as fake:
        calling = asyncio.create_task(begun(fake))
        async with StockClient(fake.port).request("POST", "/", b"{}") as answer:
            call = await calling
            following = asyncio.create_task(answer.follow(take))
            await asyncio.sleep(0)
            await call.send(b"one")
            await call.send(b"two")
            with pytest.raises(ValueError, match="unreadable"):
                await asyncio.wait_for(following, 10)
        await asyncio.wait_for(call.is_broken.wait(), 10)

    assert len(taken) == 1


async def test_what_came_before_a_connection_broke_is_taken_first() -> None:
    taken: list[bytes] = []
    async with fake_vllm() as fake:
        calling = asyncio.create_task(begun(fake))
        async with StockClient(fake.port).request("POST", "/", b"{}") as answer:
            call = await calling
            await call.send(b"one")
            await answer.wait_for_body()
            call.cut()
            with pytest.raises(HttpFailedError, match="closed the connection"):
                await asyncio.wait_for(answer.follow(taken.append), 10)

    assert taken == [b"one"]


async def test_a_connection_serves_the_next_request_after_a_whole_answer() -> None:
    async with fake_vllm() as fake:
        client = StockClient(fake.port)
        calls = [await whole(client, fake) for _ in range(2)]
        client.close()
        await asyncio.wait_for(calls[1].is_broken.wait(), 10)

    assert calls[0].connection is calls[1].connection


async def test_an_answer_that_was_left_early_ends_its_connection() -> None:
    async with fake_vllm() as fake:
        client = StockClient(fake.port)
        calling = asyncio.create_task(begun(fake))
        async with client.request("POST", "/", b"{}"):
            left = await calling
        await asyncio.wait_for(left.is_broken.wait(), 10)
        later = await whole(client, fake)
        client.close()

    assert left.connection is not later.connection


async def test_a_connection_that_the_server_closed_meanwhile_is_made_again() -> None:
    async with fake_vllm() as fake:
        client = StockClient(fake.port)
        first = await whole(client, fake)
        first.cut()  # the client does not see it before it writes
        later = await whole(client, fake)
        client.close()

    assert first.connection is not later.connection


async def test_a_request_after_a_restart_of_the_server_is_sent_over_a_new_connection() -> None:
    async with fake_vllm() as fake:
        client = StockClient(fake.port)
        (await whole(client, fake)).cut()
    async with fake_vllm(fake.port) as restarted:
        await whole(client, restarted)
        client.close()


async def test_a_request_to_a_server_that_has_ended_is_refused_and_not_cut() -> None:
    async with fake_vllm() as fake:
        client = StockClient(fake.port)
        (await whole(client, fake)).cut()
    with pytest.raises(HttpFailedError) as failed:
        await client.post("/", b"{}")

    assert failed.value.is_refused
    assert not failed.value.is_cut


async def test_a_request_that_is_cut_on_its_own_connection_is_not_sent_again() -> None:
    async with fake_vllm() as fake:
        client = StockClient(fake.port)
        asking = asyncio.create_task(client.post("/", b"{}"))
        (await asyncio.wait_for(fake.calls.get(), 10)).cut()
        with pytest.raises(HttpFailedError) as failed:
            await asyncio.wait_for(asking, 10)

    assert failed.value.is_cut
    assert fake.calls.empty()


async def test_a_connection_without_a_request_for_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdcluster_worker.stock_engine.http.IDLE_SECONDS", -1.0)
    async with fake_vllm() as fake:
        client = StockClient(fake.port)
        first, later = [await whole(client, fake) for _ in range(2)]
        client.close()

    assert first.connection is not later.connection


async def whole(client: StockClient, fake: FakeVllm) -> Call:
    """A request whose answer ends."""
    calling = asyncio.create_task(asyncio.wait_for(fake.calls.get(), 10))
    asking = asyncio.create_task(client.post("/", b"{}"))
    call = await calling
    await call.answer(b"done")
    assert await asyncio.wait_for(asking, 10) == b"done"
    return call
