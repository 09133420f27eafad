"""The server's end of the wall to the engine: sorting, death, duplicates."""

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages import engine as messages
from pdcluster_worker.messages.engine import (
    Abort,
    BlockEvents,
    EngineFailed,
    EngineInput,
    EngineOutput,
    RequestFailed,
    Submit,
    Tokens,
)
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.serving.engines.client import EngineClient, EngineDiedError
from pdcluster_worker.tracing import trace_context
from tests.worker.serving.doubles import stats

SPEC = RequestSpec("r1", [1, 2], SamplingParams(max_tokens=1, seed=0))


class Wire:
    """Both directions of the socket as queues."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[bytes] = asyncio.Queue()
        self.arriving: asyncio.Queue[bytes] = asyncio.Queue()

    async def recv(self) -> bytes:
        return await self.arriving.get()

    async def send(self, data: bytes) -> None:
        self.sent.put_nowait(data)

    def say(self, *outputs: EngineOutput) -> None:
        self.arriving.put_nowait(messages.encode(list(outputs)))

    async def heard(self) -> list[EngineInput]:
        return messages.decode_inputs(await self.sent.get())


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
async def client(wire: Wire) -> AsyncIterator[EngineClient]:
    client = EngineClient(wire)
    task = asyncio.create_task(client.run())
    yield client
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_client_sorts_outputs_by_request(client, wire):
    one, two = client.open("r1"), client.open("r2")
    wire.say(Tokens([Token("r2", 22), Token("r1", 11)]))

    assert (await one.token()).token_id == 11
    assert (await two.token()).token_id == 22


async def test_client_knows_the_trace_of_an_open_request(client):
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    trace_context.enter(parent)
    mailbox = client.open("r1")
    trace_context.enter("")
    client.open("r2")

    assert client.trace("r1") == {"traceparent": parent}
    assert client.trace("r2") == {}
    client.close(mailbox)
    assert client.trace("r1") == {}


async def test_client_keeps_the_order_of_messages(client, wire):
    client.send(Submit(SPEC))
    client.send(Abort("r1"))

    assert await wire.heard() == [Submit(SPEC), Abort("r1")]


async def test_client_close_aborts_a_request_that_has_not_ended(client, wire):
    client.close(client.open("r1"))

    assert await wire.heard() == [Abort("r1")]


async def test_client_close_says_nothing_of_a_request_that_has_ended(client, wire):
    mailbox = client.open("r1")
    wire.say(Tokens([Token("r1", 1, finish_reason="stop")]))
    await mailbox.token()
    client.close(mailbox)
    client.send(Abort("marker"))

    assert await wire.heard() == [Abort("marker")]


async def test_client_refuses_an_id_in_use(client):
    client.open("r1")
    with pytest.raises(RequestError, match="already being served"):
        client.open("r1")


async def test_client_one_failed_request_fails_alone(client, wire):
    bad, good = client.open("bad"), client.open("good")
    refused = client.open("refused")
    wire.say(RequestFailed("refused", "too large", is_refusal=True))
    with pytest.raises(RequestError, match="too large") as caught:
        await refused.get()
    assert (caught.value.status, caught.value.code) == (400, None)

    wire.say(RequestFailed("bad", "not finite"), Tokens([Token("good", 1)]))

    with pytest.raises(RequestError, match="not finite"):
        await bad.get()
    assert (await good.token()).token_id == 1


async def test_client_request_of_an_adapter_that_has_gone_is_of_an_unknown_model(client, wire):
    gone = client.open("gone")
    wire.say(RequestFailed("gone", "it was unloaded", lacks_adapter=True))
    with pytest.raises(RequestError, match="it was unloaded") as caught:
        await gone.get()
    error = caught.value
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


async def test_client_death_of_the_engine_fails_open_and_later_requests(client, wire):
    mailbox = client.open("r1")
    wire.say(EngineFailed("out of memory"))

    with pytest.raises(EngineDiedError, match="out of memory"):
        await mailbox.get()
    with pytest.raises(EngineDiedError, match="out of memory"):
        client.send(Submit(SPEC))
    with pytest.raises(EngineDiedError, match="out of memory"):
        await client.ready()


async def test_begin_is_sent_first_and_is_no_message_that_statistics_know_of(client, wire):
    client.begin("bfloat16")
    client.send(Submit(SPEC))
    assert (await wire.heard()) == [messages.Begin("bfloat16"), Submit(SPEC)]
    client.stats = stats(free_blocks=0, num_inputs=1)
    assert client.is_reported


async def test_an_engine_loads_until_it_says_that_it_serves_or_dies(client):
    assert client.is_loading
    client.fail("it is gone")
    assert not client.is_loading


async def test_late_words_of_an_engine_that_was_killed_count_for_nothing(client, wire):
    """Its counters would be added a second time, since those of its rank begin again, and its
    blocks are no choice any more.
    """
    told: list[object] = []
    client.on_stats.append(told.append)
    client.on_blocks.append(told.append)
    wire.say(stats(free_blocks=1))
    while not told:
        await asyncio.sleep(0)
    client.fail("it has stalled")
    wire.say(stats(free_blocks=2), BlockEvents([b"a"], [], 1))
    while not wire.arriving.empty():
        await asyncio.sleep(0)

    assert told == [stats(free_blocks=1)]
    assert client.stats == stats(free_blocks=1)


async def test_engine_that_dies_unawaited_leaves_nothing_unretrieved(wire):
    unretrieved: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
    client = EngineClient(wire)
    client.fail("it is gone")
    del client
    gc.collect()

    assert unretrieved == []


class TakingReader:
    """Takes so many tokens."""

    def __init__(self, wait_for_blocks: int) -> None:
        self.wait_for_blocks = wait_for_blocks
        self.taken: list[int] = []

    @property
    def is_open(self) -> bool:
        return len(self.taken) < self.wait_for_blocks

    def take(self, item: Token) -> None:
        self.taken.append(item.token_id)


async def test_reader_takes_tokens_that_are_waited_for_up_to_the_last(client, wire):
    mailbox, reader = client.open("r1"), TakingReader(9)
    wire.say(Tokens([Token("r1", 1)]))
    first = await mailbox.token()
    waiting = asyncio.create_task(mailbox.token(reader))
    await asyncio.sleep(0)
    wire.say(Tokens([Token("r1", 2)]))
    wire.say(Tokens([Token("r1", 3), Token("r1", 4, finish_reason="length")]))
    last = await waiting

    assert (first.token_id, reader.taken, last.token_id) == (1, [2, 3], 4)
    assert mailbox.num_tokens == 4
    assert mailbox.ended


async def test_tokens_that_a_reader_does_not_take_keep_their_order(client, wire):
    mailbox, reader = client.open("r1"), TakingReader(1)
    waiting = asyncio.create_task(mailbox.token(reader))
    await asyncio.sleep(0)
    wire.say(Tokens([Token("r1", 1), Token("r1", 2), Token("r1", 3)]))
    second = await waiting
    reader.wait_for_blocks = 9
    third = await mailbox.token(reader)

    assert (reader.taken, second.token_id, third.token_id) == ([1], 2, 3)


class BrokenReader(TakingReader):
    """Raises when it is given a token."""

    def take(self, item: Token) -> None:
        raise ValueError("cannot be written")


class UnsureReader(TakingReader):
    """Raises when it is asked whether it takes one."""

    @property
    def is_open(self) -> bool:
        raise ValueError("cannot be written")


@pytest.mark.parametrize("broken", [BrokenReader, UnsureReader])
async def test_reader_that_raises_fails_its_own_request_alone(client, wire, broken):
    one, two = client.open("r1"), client.open("r2")
    waiting = asyncio.create_task(one.token(broken(9)))
    await asyncio.sleep(0)
    wire.say(Tokens([Token("r1", 1), Token("r2", 2)]))

    with pytest.raises(ValueError, match="cannot be written"):
        await waiting
    assert (await two.token()).token_id == 2


async def test_reader_gets_nothing_after_its_wait_was_cancelled(client, wire):
    mailbox, reader = client.open("r1"), TakingReader(9)
    waiting = asyncio.create_task(mailbox.token(reader))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    wire.say(Tokens([Token("r1", 1)]))

    assert (await mailbox.token()).token_id == 1
    assert reader.taken == []


async def test_error_after_tokens_that_a_reader_took_ends_the_wait(client, wire):
    mailbox, reader = client.open("r1"), TakingReader(9)
    waiting = asyncio.create_task(mailbox.token(reader))
    await asyncio.sleep(0)
    wire.say(Tokens([Token("r1", 1)]), RequestFailed("r1", "out of range"))
    with pytest.raises(RequestError, match="out of range"):
        await waiting

    assert (reader.taken, mailbox.ended) == ([1], True)
