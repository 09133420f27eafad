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
