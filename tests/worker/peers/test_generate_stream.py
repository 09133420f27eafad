"""Requests of a pair on one stream of Generate: each apart from the others, whatever those do."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import grpc
import msgspec
import pytest

from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.peers import (
    CallEnd,
    CallOutput,
    CancelCall,
    Generated,
    SubmitCall,
    decode_replies,
    encode,
)
from pdcluster_worker.messages.requests import Token
from pdcluster_worker.peers.batched_writer import MAX_ITEM_BYTES
from pdcluster_worker.peers.calls import MAX_MESSAGE_BYTES, WorkerStub, open_channel
from pdcluster_worker.peers.generate_service import GenerateService

Eventually = Callable[..., Any]


@pytest.fixture
async def d(worker: Any, eventually: Eventually) -> Any:
    """A decode worker that is ready to call `d2`, its `other`."""
    d, d2 = await worker("d", "decode"), await worker("d2", "decode")
    d.sees(d2)
    d.d2 = (await eventually(d.directory.decodes))[0]
    d.other = d2
    return d


async def collect(iterator: Any) -> list[Any]:
    return [item async for item in iterator]


async def test_many_requests_are_answered_each_with_its_own_tokens(d: Any, spec: Any) -> None:
    specs = [spec(request_id=f"q{number}", prompt=[number + 1]) for number in range(300)]

    answers = await asyncio.gather(*(collect(d.d2.generate(one, "auto")) for one in specs))

    assert answers == [
        [
            Generated(Token(f"q{number}", number + 1), "remote"),
            Generated(Token(f"q{number}", number + 1, finish_reason="length")),
        ]
        for number in range(300)
    ]


async def test_an_end_of_one_request_leaves_the_others_alone(
    d: Any, spec: Any, eventually: Eventually
) -> None:
    d.other.handler.hold = True
    one, other = d.d2.generate(spec(request_id="one"), "auto"), d.d2.generate(spec(), "auto")
    await anext(one)
    await anext(other)

    await one.aclose()
    await eventually(lambda: d.other.handler.closed == ["one"])
    d.other.handler.hold = False
    d.other.handler.error = RequestError("full", status=503)
    with pytest.raises(RequestError, match="full"):
        await collect(d.d2.generate(spec(request_id="third"), "auto"))

    assert "q1" not in d.other.handler.closed
    await other.aclose()
    await eventually(lambda: "q1" in d.other.handler.closed)


async def test_a_request_too_long_for_a_message_fails_alone(
    d: Any, spec: Any, eventually: Eventually
) -> None:
    d.other.handler.hold = True
    one = d.d2.generate(spec(request_id="one"), "auto")
    await anext(one)
    long = spec(request_id="x" * MAX_MESSAGE_BYTES)

    with pytest.raises(RequestError, match=f"may take {MAX_ITEM_BYTES}") as raised:
        await collect(d.d2.generate(long, "auto"))

    assert (raised.value.status, raised.value.code) == (413, "message_too_large")
    d.other.handler.hold = False
    assert len(await collect(d.d2.generate(spec(), "auto"))) == 2
    await eventually(lambda: d.other.handler.closed == ["q1"])  # the first one goes on
    await one.aclose()


async def test_an_answer_too_long_for_a_message_fails_alone(
    d: Any, spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    d.other.handler.hold = True
    one = d.d2.generate(spec(request_id="one"), "auto")
    await anext(one)
    d.other.handler.hold = False
    generate = d.other.handler.generate

    async def too_much(requested: Any, prefill: str) -> AsyncIterator[Generated]:
        yield Generated(Token("long", 1), degraded=("x" * MAX_MESSAGE_BYTES,))

    monkeypatch.setattr(d.other.handler, "generate", too_much)
    with pytest.raises(RequestError, match="fewer logprobs"):
        await collect(d.d2.generate(spec(request_id="long"), "auto"))

    monkeypatch.setattr(d.other.handler, "generate", generate)
    assert len(await collect(d.d2.generate(spec(), "auto"))) == 2
    await one.aclose()


async def test_a_stream_may_end_while_its_first_answer_is_written(
    d: Any, spec: Any, credentials: Any, caplog: pytest.LogCaptureFixture
) -> None:
    channel = open_channel(d.other.record.grpc_address, credentials.channel)
    for_another = SubmitCall(0, "another engine", "auto", msgspec.Raw(encode(spec())))

    async with asyncio.timeout(60):
        for num_between in range(60):
            call = WorkerStub(channel).generate()
            await call.initial_metadata()  # before any answer
            for frame in [encode([for_another]), *[encode([])] * num_between]:
                await call.write(frame)
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
            assert await call.code() is grpc.StatusCode.OK

    await channel.close(None)
    assert "ExecuteBatchError" not in caplog.text


async def test_a_request_after_a_break_opens_another_stream(d: Any, spec: Any) -> None:
    d.other.handler.hold = True
    tokens = d.d2.generate(spec(), "auto")
    await anext(tokens)
    await d.d2._channel.generate_stream().close()

    with pytest.raises(PeerError):
        await anext(tokens)
    with pytest.raises(StopAsyncIteration):
        await anext(tokens)
    d.other.handler.hold = False
    assert len(await collect(d.d2.generate(spec(), "auto"))) == 2


async def test_a_stream_that_is_closed_before_it_begins_fails_its_requests(
    d: Any, spec: Any
) -> None:
    requested = asyncio.ensure_future(anext(d.d2.generate(spec(), "auto")))
    closing = asyncio.ensure_future(d.d2._channel.generate_stream().close())
    await asyncio.sleep(0)  # the request has opened the stream, whose task has not run

    async with asyncio.timeout(20):
        with pytest.raises(PeerError, match="closed"):
            await requested
        await closing


async def test_answer_that_was_never_read_asks_for_nothing(d: Any, spec: Any) -> None:
    tokens = d.d2.generate(spec(), "auto")
    await tokens.aclose()

    assert await collect(tokens) == []
    assert d.other.handler.calls == []


@pytest.mark.parametrize(
    ("token", "words"),
    [(Token("another", 1), "of another request"), (Token("q1", -1), "token_id is negative")],
)
async def test_impossible_token_ends_its_request(
    d: Any, spec: Any, eventually: Eventually, token: Token, words: str
) -> None:
    d.other.handler.hold = True
    tokens = d.d2.generate(spec(), "auto")
    await anext(tokens)

    tokens.take(Generated(token))

    with pytest.raises(PeerError, match=f"impossible answer: .*{words}"):
        await anext(tokens)
    await eventually(lambda: d.other.handler.closed == ["q1"])


async def test_what_is_no_request_is_refused_alone_or_ends_the_stream(
    d: Any, spec: Any, credentials: Any
) -> None:
    channel = open_channel(d.other.record.grpc_address, credentials.channel)
    call: Any = WorkerStub(channel).generate()
    engine = d.other.handler.engine_id
    good = msgspec.Raw(encode(spec(request_id="good")))

    def ask(number: int, encoded: Any) -> SubmitCall:
        return SubmitCall(number, engine, "auto", encoded)

    bad = ask(0, msgspec.Raw(encode({"request_id": "q"})))
    await call.write(encode([bad, CancelCall(7), ask(1, good)]))
    said: list[CallOutput | CallEnd] = []
    while len(said) < 3:
        said += decode_replies(await anext(aiter(call)))
    failed = next(each for each in said if isinstance(each, CallEnd))
    assert failed.call == 0
    assert failed.failure is not None
    assert failed.failure.status == 400
    assert [each.call for each in said if isinstance(each, CallOutput)] == [1, 1]

    d.other.handler.hold = True
    await call.write(encode([ask(2, good), ask(2, good)]))
    with pytest.raises(grpc.aio.AioRpcError, match="call 2 is under way"):
        await collect(call)  # the first of the two may have said something
    await channel.close(None)


async def test_a_request_ends_when_its_last_token_is_out(
    d: Any, spec: Any, eventually: Eventually
) -> None:
    """A worker that has drained may end: nothing that it has said may be on the way inside it."""
    handler, may_write = d.other.handler, asyncio.Event()

    class Context:
        async def send_initial_metadata(self, metadata: tuple[()]) -> None:
            """The head is out at once."""

        async def write(self, frame: bytes) -> None:
            await may_write.wait()

    async def frames() -> AsyncIterator[bytes]:
        encoded = msgspec.Raw(encode(spec()))
        yield encode([SubmitCall(0, handler.engine_id, "auto", encoded)])
        await asyncio.Event().wait()

    context: Any = Context()
    serving = asyncio.create_task(GenerateService(handler, context).serve(frames()))
    await eventually(lambda: handler.calls)
    for _ in range(10):
        await asyncio.sleep(0)
    assert handler.closed == []

    may_write.set()
    await eventually(lambda: handler.closed == ["q1"])
    serving.cancel()


async def test_a_request_that_is_called_off_before_it_begins_is_forgotten(
    d: Any, spec: Any
) -> None:
    handler, read = d.other.handler, asyncio.Event()
    context: Any = SimpleNamespace(write=None, send_initial_metadata=AsyncMock())

    async def frames() -> AsyncIterator[bytes]:
        encoded = msgspec.Raw(encode(spec()))
        yield encode([SubmitCall(0, handler.engine_id, "auto", encoded), CancelCall(0)])
        read.set()
        await asyncio.Event().wait()

    service = GenerateService(handler, context)
    serving = asyncio.create_task(service.serve(frames()))
    await read.wait()
    for _ in range(3):
        await asyncio.sleep(0)
    assert (service._running, handler.calls) == ({}, [])
    serving.cancel()
