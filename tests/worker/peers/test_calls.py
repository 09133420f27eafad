"""Generate, Prefill, Credits and Watch between two real workers: the answers, the refusals, the
ends.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import msgspec
import pytest

from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.peers import (
    ClaimCredit,
    Generated,
    OpenCredits,
    PrefillCall,
    ReleaseCredit,
    Report,
    WatchCall,
    WorkerLoad,
    decode_credit_reply,
    decode_report,
    encode,
)
from pdcluster_worker.messages.requests import Token
from pdcluster_worker.peers.calls import MAX_MESSAGE_BYTES, WorkerStub, open_channel
from pdcluster_worker.peers.service import WorkerService

Eventually = Callable[..., Any]


@pytest.fixture
async def p(worker: Any) -> Any:
    """A prefill worker that grants 100 tokens at a time."""
    return await worker("p", "prefill", limit_tokens=100)


@pytest.fixture
async def d(worker: Any, p: Any, eventually: Eventually) -> Any:
    """A decode worker that is ready to call `p` and `d2`."""
    d, d2 = await worker("d", "decode"), await worker("d2", "decode")
    d.sees(p, d2)
    d.p = (await eventually(d.directory.prefills))[0]
    d.d2 = (await eventually(d.directory.decodes))[0]
    d.other = d2
    return d


@pytest.fixture
async def stub(p: Any, credentials: Any) -> AsyncIterator[Any]:
    """Bare calls to `p`, for what no client of ours would send."""
    channel = open_channel(p.record.grpc_address, credentials.channel)
    yield WorkerStub(channel)
    await channel.close(None)


async def collect(iterator: Any) -> list[Any]:
    return [item async for item in iterator]


async def granted(d: Any, eventually: Eventually, request_id: str = "q1", tokens: int = 3) -> None:
    d.p.claim(request_id, tokens, 0)
    await eventually(lambda: ("p", request_id, True) in d.credits)


# --- ask ------------------------------------------------------------------------------------------


async def test_the_front_end_of_a_peer_s_engine_answers(d: Any) -> None:
    assert await d.d2.ask("/detokenize", b"x") == b"tokens of x"

    d.other.handler.error = RequestError("no such role", param="messages")
    with pytest.raises(RequestError, match="no such role") as refused:
        await d.d2.ask("/detokenize", b"x")
    assert (refused.value.status, refused.value.param) == (400, "messages")
    d.other.handler.error = PeerError("its engine is gone")
    with pytest.raises(PeerError, match="its engine is gone"):
        await d.d2.ask("/detokenize", b"x")


async def test_a_lost_peer_gets_no_call(d: Any) -> None:
    await d.d2.close()
    with pytest.raises(PeerError, match="worker d2 is lost"):
        await d.d2.ask("/detokenize", b"x")


# --- generate -------------------------------------------------------------------------------------


async def test_generate_streams_tokens_as_the_handler_makes_them(d: Any, spec: Any) -> None:
    lost = ("max_tokens=2", "prefill=local")
    d.other.handler.degraded = lost
    answer = await collect(d.d2.generate(spec(), "remote"))

    assert answer == [
        Generated(Token("q1", 5), "remote", degraded=lost),
        Generated(Token("q1", 7, finish_reason="length")),
    ]
    assert d.other.handler.calls == [("generate", spec(), "remote")]


async def test_generate_carries_a_prompt_of_128k_tokens(d: Any, spec: Any) -> None:
    long = spec(prompt=[200_000_000] * 131_072)

    await collect(d.d2.generate(long, "auto"))

    assert d.other.handler.calls[0][1] == long


@pytest.mark.parametrize(
    "error",
    [
        RequestError("top_k is too large", param="top_k", code="bad_value"),
        RequestError("no such model", status=404),
        RequestError("queue is full", status=503, code="overloaded", retry_after_seconds=3),
        RequestError("the id is in use", status=409),
        RequestError("low priority", status=429, code="slo_ttft", retry_after_seconds=7),
        RequestError("broken", status=500),
    ],
    ids=lambda error: str(error.status),
)
async def test_request_error_arrives_as_it_was_raised(
    d: Any, spec: Any, error: RequestError
) -> None:
    d.other.handler.error = error

    with pytest.raises(RequestError) as caught:
        await collect(d.d2.generate(spec(), "auto"))

    assert vars(caught.value) == vars(error)
    d.other.handler.error = RequestError("긴 오류 " * 5000)
    with pytest.raises(RequestError, match="긴 오류"):
        await collect(d.d2.generate(spec(), "auto"))


@pytest.mark.parametrize(
    ("error", "match"),
    [(PeerError("next hop gone"), "next hop gone"), (KeyError("bug"), "INTERNAL")],
)
async def test_other_errors_are_the_peers(d: Any, spec: Any, error: Exception, match: str) -> None:
    d.other.handler.error = error

    with pytest.raises(PeerError, match=match):
        await collect(d.d2.generate(spec(), "auto"))


async def test_server_that_stops_is_a_peer_error_and_no_cancellation(d: Any, spec: Any) -> None:
    d.other.handler.hold = True
    tokens = d.d2.generate(spec(), "auto")
    await anext(tokens)

    await d.other.server.stop(None)

    with pytest.raises(PeerError):
        await anext(tokens)


async def test_calls_have_let_go_once_the_service_has_ended(d: Any, p: Any, spec: Any) -> None:
    d.other.handler.hold = True
    tokens = d.d2.generate(spec(), "auto")
    await anext(tokens)
    calls = [task for task in asyncio.all_tasks() if "_schedule_rpc_coro" in repr(task)]

    for worker in (d, p, d.other):
        await worker.server.stop(0)
    for worker in (d, p, d.other):
        await worker.service.ended(1)

    assert d.other.handler.closed == ["q1"]
    # one that is cancelled only now may print a traceback
    assert [call.done() for call in calls] == [True] * len(calls) != []


async def test_call_that_outlives_the_wait_for_its_end_is_logged(
    d: Any, spec: Any, caplog: pytest.LogCaptureFixture
) -> None:
    d.other.handler.hold = True
    tokens = d.d2.generate(spec(), "auto")
    await anext(tokens)

    await d.other.service.ended(0.01)  # its server has not stopped

    assert "calls of peers still open" in caplog.text


async def test_old_engine_id_is_refused_with_both_ids(d: Any, spec: Any) -> None:
    d.d2.record = msgspec.structs.replace(d.d2.record, engine_id="older")

    with pytest.raises(PeerError, match=r"FAILED_PRECONDITION.*older.*engine-of-d2"):
        await collect(d.d2.generate(spec(), "auto"))
    assert d.other.handler.calls == []


@pytest.mark.parametrize("close", ["aclose", "cancel"])
async def test_ending_a_generate_ends_the_handlers_iterator(
    d: Any, spec: Any, eventually: Eventually, close: str
) -> None:
    d.other.handler.hold = True
    tokens = d.d2.generate(spec(), "auto")
    await anext(tokens)

    if close == "aclose":
        await tokens.aclose()
    else:
        waiting = asyncio.create_task(anext(tokens))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    await eventually(lambda: d.other.handler.closed == ["q1"])


async def test_unknown_prefill_mode_is_the_requests_fault(d: Any, spec: Any) -> None:
    with pytest.raises(RequestError, match="must be one of auto, local, remote"):
        await collect(d.d2.generate(spec(), "sideways"))


# --- prefill --------------------------------------------------------------------------------------


async def test_prefill_is_a_token_and_done(
    d: Any, p: Any, spec: Any, target: Any, eventually: Eventually
) -> None:
    await granted(d, eventually)

    answer = await collect(d.p.prefill(spec(), target))

    assert answer == [Token("q1", 7), PrefillDone("q1", 4096, 0.5, checksum=7)]
    assert p.handler.calls == [("prefill", "engine-of-d", spec(), target)]
    await eventually(lambda: p.handler.ledger.outstanding_tokens == 0)


async def test_first_token_that_ends_the_request_is_the_whole_answer(
    d: Any, spec: Any, target: Any, eventually: Eventually
) -> None:
    await granted(d, eventually)

    answer = await collect(d.p.prefill(spec(max_tokens=1), target))

    assert answer == [Token("q1", 7, finish_reason="length")]


async def test_prefill_without_a_credit_is_refused(d: Any, p: Any, spec: Any, target: Any) -> None:
    with pytest.raises(PeerError, match=r"FAILED_PRECONDITION.*has no credit"):
        await collect(d.p.prefill(spec(), target))
    assert p.handler.calls == []


async def test_prefill_that_needs_no_credit_is_done_without(
    d: Any, p: Any, spec: Any, target: Any
) -> None:
    p.handler.needs_credit = False
    answer = await collect(d.p.prefill(spec(), target))

    assert [type(reply) for reply in answer] == [Token, PrefillDone]
    assert p.handler.ledger.outstanding_tokens == 0


async def test_prefill_for_an_old_engine_is_refused_and_keeps_the_credit(
    d: Any, p: Any, spec: Any, target: Any, eventually: Eventually
) -> None:
    await granted(d, eventually)
    d.p.record = msgspec.structs.replace(d.p.record, engine_id="older")

    with pytest.raises(PeerError, match="older"):
        await collect(d.p.prefill(spec(), target))
    assert p.handler.ledger.outstanding_tokens == 3


async def test_credit_returns_with_the_first_token(
    d: Any, p: Any, spec: Any, target: Any, eventually: Eventually
) -> None:
    await granted(d, eventually)
    p.handler.hold = True

    async with aclosing(d.p.prefill(spec(), target)) as replies:
        await anext(replies)

        assert p.handler.ledger.outstanding_tokens == 0
    await eventually(lambda: p.handler.closed == ["q1"])


async def test_failed_prefill_returns_its_credit_to_the_next(
    d: Any, p: Any, spec: Any, target: Any, eventually: Eventually
) -> None:
    p.handler.error = RequestError("no blocks", status=503)
    await granted(d, eventually, tokens=100)
    d.p.claim("q2", 100, 0)
    await eventually(lambda: ("p", "q2", False) in d.credits)

    with pytest.raises(RequestError, match="no blocks"):
        await collect(d.p.prefill(spec(), target))

    await eventually(lambda: ("p", "q2", True) in d.credits)


async def test_impossible_target_is_refused(
    d: Any, p: Any, spec: Any, target: Any, eventually: Eventually
) -> None:
    await granted(d, eventually)

    with pytest.raises(RequestError, match="epoch has 3 bytes"):
        await collect(d.p.prefill(spec(), msgspec.structs.replace(target, epoch=b"bad")))
    assert p.handler.calls == []


async def test_refused_pair_cannot_prefill(
    worker: Any, p: Any, stub: Any, spec: Any, target: Any
) -> None:
    other = await worker("d", "decode", weights="w2")
    await stub.handshake(encode(other.hello))
    call = encode(PrefillCall(spec(), p.handler.engine_id, target))

    with pytest.raises(grpc.aio.AioRpcError, match="is refused: weights"):
        await collect(stub.prefill(call))
    with pytest.raises(grpc.aio.AioRpcError, match="is refused: weights"):
        await collect(stub.credits(iter([encode(OpenCredits(other.hello.engine_id))])))


@pytest.mark.parametrize(
    "name", ["handshake", "generate", "prefill", "push_prefix", "credits", "watch"]
)
@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\xa2\xff\xfe",
        encode({}),
        encode([{}]),
        encode({"engine_id": -1}),
    ],
    ids=["empty", "no opcode", "cut", "deep", "no text", "no fields", "no tag", "wrong type"],
)
async def test_message_that_cannot_be_read_is_invalid_and_loses_nothing(
    stub: Any, d: Any, p: Any, spec: Any, target: Any, name: str, message: bytes
) -> None:
    is_stream = name in ("generate", "push_prefix", "credits")
    call = getattr(stub, name)(iter([message]) if is_stream else message)
    with pytest.raises(grpc.aio.AioRpcError, match="cannot be read") as caught:
        await (call if name == "handshake" else collect(call))

    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    p.handler.needs_credit = False
    assert len(await collect(d.p.prefill(spec(), target))) == 2
    assert (d.lost, p.handler.ledger.outstanding_tokens) == ([], 0)


# --- credits --------------------------------------------------------------------------------------


async def test_want_is_answered_at_once_and_granted_when_room_comes(
    d: Any, eventually: Eventually
) -> None:
    await granted(d, eventually, "q1", 80)
    d.p.claim("q2", 80, 0)
    await eventually(lambda: ("p", "q2", False) in d.credits)

    d.p.release("q1")

    await eventually(lambda: ("p", "q2", True) in d.credits)


async def test_grant_goes_to_the_peer_that_it_names(
    worker: Any, d: Any, p: Any, eventually: Eventually
) -> None:
    e = await worker("e", "decode")
    e.sees(p)
    from_e = (await eventually(e.directory.prefills))[0]
    await granted(d, eventually, "q1", 80)
    from_e.claim("q1", 80, 0)
    await eventually(lambda: e.credits == [("p", "q1", False)])

    d.p.release("q1")

    await eventually(lambda: e.credits == [("p", "q1", False), ("p", "q1", True)])
    assert d.credits == [("p", "q1", True)]


async def test_credits_of_a_peer_that_vanishes_return(
    worker: Any, d: Any, p: Any, eventually: Eventually
) -> None:
    e = await worker("e", "decode")
    e.sees(p)
    from_e = (await eventually(e.directory.prefills))[0]
    await granted(d, eventually, "q1", 80)
    from_e.claim("q2", 80, 0)
    await eventually(lambda: e.credits == [("p", "q2", False)])

    await d.directory.close()

    await eventually(lambda: ("p", "q2", True) in e.credits)


async def test_new_limit_is_pushed(d: Any, p: Any, eventually: Eventually) -> None:
    await granted(d, eventually, "q1", 80)
    d.p.claim("q2", 80, 0)
    await eventually(lambda: ("p", "q2", False) in d.credits)

    p.service.credit_server.push(p.handler.ledger.set_limit(200))

    await eventually(lambda: ("p", "q2", True) in d.credits)


async def test_second_stream_of_a_peer_voids_the_first_and_outlives_it(
    p: Any, stub: Any, eventually: Eventually
) -> None:
    async def calls(request_id: str) -> Any:
        yield encode(OpenCredits("e"))
        yield encode(ClaimCredit(request_id, 60, 0))
        await asyncio.Event().wait()

    async def is_granted(call: Any) -> bool:
        return decode_credit_reply(await call.read()).granted

    first = stub.credits(calls("q1"))
    assert await is_granted(first)
    second = stub.credits(calls("q2"))
    assert await is_granted(second)

    first.cancel()
    third = stub.credits(calls("q3"))
    assert await is_granted(third)
    assert p.handler.ledger.outstanding_tokens == 60
    second.cancel()
    third.cancel()
    await eventually(lambda: p.handler.ledger.outstanding_tokens == 0)


async def test_a_stream_of_credits_may_end_while_its_first_answer_is_written(
    stub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    claim, release = encode(ClaimCredit("q1", 60, 0)), encode(ReleaseCredit("q2"))

    async with asyncio.timeout(60):
        for num_between in range(60):
            call = stub.credits()
            await call.write(encode(OpenCredits("e")))
            await call.initial_metadata()  # before any answer
            for message in [claim, *[release] * num_between]:
                await call.write(message)
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
            assert await call.code() is grpc.StatusCode.OK

    assert "ExecuteBatchError" not in caplog.text


async def test_impossible_want_ends_the_stream(p: Any, stub: Any) -> None:
    calls = [encode(OpenCredits("e")), encode(ClaimCredit("q1", 0, 0))]

    with pytest.raises(grpc.aio.AioRpcError, match="wants 0 tokens"):
        await collect(stub.credits(iter(calls)))


async def test_claim_before_the_stream_names_its_worker_is_refused(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="must name the engine id"):
        await collect(stub.credits(iter([encode(ClaimCredit("q1", 1, 0))])))


async def test_a_fault_in_taking_a_credit_loses_no_peer_for_good(
    d: Any, eventually: Eventually
) -> None:
    """A cancellation, too, which looks as if the peer's own task were to end."""
    reports = d.directory._reports
    for fault in (asyncio.CancelledError(), KeyError("a fault of ours")):

        def fail(*_: Any, fault: BaseException = fault) -> None:
            d.directory.report_to(reports)
            raise fault

        d.lost.clear()
        d.directory.report_to(replace(reports, on_credit=fail))
        d.p.claim("before", 3, 0)
        await eventually(lambda: "p" in d.lost)
        d.p = (await eventually(d.directory.prefills))[0]
        d.credits.clear()
        await granted(d, eventually, "after")


# --- watch ----------------------------------------------------------------------------------------


async def test_watch_numbers_its_reports(p: Any, stub: Any) -> None:
    p.handler.reports = [
        Report(WorkerLoad(), snapshot=True),
        Report(WorkerLoad()),
        Report(WorkerLoad()),
    ]
    watch = stub.watch(encode(WatchCall(p.handler.engine_id)))

    reports = [decode_report(await watch.read()) for _ in range(3)]

    assert [(report.sequence, report.snapshot) for report in reports] == [
        (1, True),
        (2, False),
        (3, False),
    ]
    watch.cancel()


async def test_prefix_cache_larger_than_a_message_comes_in_parts(
    p: Any, worker: Any, eventually: Eventually
) -> None:
    hashes = tuple(number.to_bytes(32) for number in range(MAX_MESSAGE_BYTES // 34 + 1))
    p.handler.reports = [Report(WorkerLoad(state="ready"), stored=hashes, snapshot=True)]
    d = await worker("d", "decode")
    d.sees(p)

    await eventually(lambda: d.index.match("p", hashes[-1:]) == 1)
    assert d.index.match("p", hashes[:100]) == 100


async def test_watch_of_an_old_engine_is_refused(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="older"):
        await collect(stub.watch(encode(WatchCall("older"))))


async def test_gap_in_the_watch_brings_a_new_snapshot(
    worker: Any, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches = []

    async def with_gap(_: WorkerService, message: bytes, context: Any) -> None:
        """A subscription that loses its second report, the first time."""
        watches.append(message)
        number = 3 if len(watches) == 1 else 2
        last = Report(WorkerLoad(num_running=number), stored=(b"b",), sequence=number)
        for report in (
            Report(WorkerLoad(), stored=(b"a",), snapshot=True, sequence=1),
            Report(WorkerLoad(num_running=99), removed=(b"a",), sequence=1),
            last,
            last,  # a repeated report changes nothing, and is no gap
        ):
            await context.write(encode(report))
        await asyncio.Event().wait()

    monkeypatch.setattr(WorkerService, "watch", with_gap)
    d, p = await worker("d", "decode"), await worker("p", "prefill")
    d.sees(p)

    await eventually(
        lambda: d.directory.prefills() and d.directory.prefills()[0].load.num_running == 2
    )
    assert len(watches) == 2
    assert d.index.match("p", [b"a", b"b"]) == 2
    assert d.lost == []
