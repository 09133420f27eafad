"""A stock engine by our messages, over a small HTTP server in its place."""

import asyncio
import re

import msgspec
import pytest

from pdcluster_worker.messages import engine as messages
from pdcluster_worker.messages.requests import Constraint, TransferTarget
from pdcluster_worker.stock_engine import engine_load, http, metrics_page
from pdcluster_worker.stock_engine.http import StockClient
from pdcluster_worker.stock_engine.metrics_page import StockMetrics, read_numbers
from pdcluster_worker.stock_engine.reports import Reports
from pdcluster_worker.stock_engine.responses import KvTransferParams, decode_handle, encode_handle
from tests.worker.stock_engine.fake_vllm import (
    METRICS,
    TRANSFER,
    end_events,
    fake_vllm,
    prefill_answer,
    tokens_event,
)
from tests.worker.stock_engine.rig import Rig, rigged, spec, until

TARGET = TransferTarget(b"e" * 16, "peer", ["h:1"], 0, [])


async def test_a_request_streams() -> None:
    async with rigged() as rig:
        rig.engine.take(messages.Submit(spec()))
        call = await rig.first_token()
        assert call.body["token_ids"] == [0, 1, 2, 3, 4]
        await call.send(tokens_event(8, reason="length") + end_events(4))
        (last,) = (await rig.said(messages.Tokens)).tokens
        assert (last.token_id, last.finish_reason, last.cached_tokens) == (8, "length", 4)
        await call.end()
        assert not rig.reports.load.has_work


async def test_an_abort_ends_the_connection_and_nothing_more_is_said() -> None:
    async with rigged() as rig:
        rig.engine.take(messages.Submit(spec()))
        call = await rig.first_token()

        rig.engine.take(messages.Abort("r"))

        await asyncio.wait_for(call.is_broken.wait(), 10)
        assert rig.outputs.empty()
        assert not rig.reports.load.has_work


async def test_an_engine_that_breaks_off_fails_the_request() -> None:
    async with rigged() as rig:
        rig.engine.take(messages.Submit(spec()))
        call = await rig.first_token()
        call.cut()

        failed = await rig.said(messages.RequestFailed)

        assert "broke off" in failed.message
        assert not failed.is_refusal


async def test_an_answer_that_breaks_off_with_its_engine_is_the_engines_end() -> None:
    async with rigged() as rig:
        rig.engine.take(messages.Submit(spec()))
        call = await rig.call()
        await call.begin()
        del rig.fake.pages["/health"]
        call.cut()

        await until(lambda: rig.gone)

    assert "closed the connection" in rig.gone[0]
    assert rig.outputs.empty()


@pytest.mark.parametrize(
    ("num_late", "is_gone"),
    [pytest.param(1, False, id="once"), pytest.param(99, True, id="again and again")],
)
async def test_an_engine_that_answers_late_is_gone_only_if_it_stays_so(
    monkeypatch: pytest.MonkeyPatch, num_late: int, is_gone: bool
) -> None:
    monkeypatch.setattr(http, "GET_SECONDS", 0.2)
    async with rigged() as rig:
        rig.engine.take(messages.Submit(spec()))
        call = await rig.call()
        rig.fake.late["/health"] = num_late
        call.cut()

        async with asyncio.timeout(10):
            while not rig.gone and rig.outputs.empty():
                await asyncio.sleep(0.01)

    assert bool(rig.gone) is is_gone
    assert rig.fake.late["/health"] == (95 if is_gone else 0)


async def test_a_refusal_names_the_parameter() -> None:
    async with rigged() as rig:
        rig.engine.take(messages.Submit(spec()))
        call = await rig.call()
        await call.answer(b'{"error":{"message":"no","param":"logprobs"}}', 400)

        failed = await rig.said(messages.RequestFailed)

        assert (failed.message, failed.is_refusal, failed.param) == ("no", True, "logprobs")


@pytest.mark.parametrize("message", [messages.Submit, messages.Receive])
async def test_what_the_engine_lacks_is_refused_without_asking_it(
    message: type[messages.Submit | messages.Receive],
) -> None:
    async with rigged() as rig:
        request = msgspec.structs.replace(spec(constraint=Constraint("json_object")), output=[1, 2])
        rig.engine.take(message(request))

        failed = await rig.said(messages.RequestFailed)

        assert failed.is_refusal
        assert failed.param == "constraint"
        assert rig.fake.calls.empty()
        assert rig.reports.load.num_receiving == 0


async def test_a_prefill_gives_a_handle_and_no_token() -> None:
    async with rigged() as rig:
        rig.engine.take(messages.Prefill(spec(), TARGET))
        call = await rig.call()
        assert call.body["kv_transfer_params"]["do_remote_decode"]
        await call.answer(prefill_answer(cached_tokens=4))

        done = await rig.said(messages.PrefillDone)

        handle = decode_handle(done.handle)
        assert (handle.transfer, handle.cached_tokens) == (TRANSFER, 4)
        load = rig.reports.load
        assert (load.prompt_tokens, load.prefill_tokens) == (0, 1), "the peer counts the prompt"


async def test_a_failed_prefill_is_an_error_also_inside_a_200() -> None:
    async with rigged() as rig:
        rig.engine.take(messages.Prefill(spec(), TARGET))
        call = await rig.call()
        await call.answer(b'{"error":{"message":"broken"}}')

        assert (await rig.said(messages.RequestFailed)).message == "broken"


async def test_fetched_kv_makes_every_token_here() -> None:
    async with rigged() as rig:
        ready = await rig.ready_to_fetch(spec())
        handle = encode_handle(KvTransferParams(TRANSFER, cached_tokens=4))

        rig.engine.take(messages.Fetch("r", ready.epoch, handle))

        call = await rig.call()
        assert call.body["kv_transfer_params"] == TRANSFER
        first = await rig.made(call, 7)
        assert (first.token_id, first.cached_tokens) == (7, 4)


async def test_kv_that_does_not_come_is_computed_here_when_the_server_says_so() -> None:
    async with rigged() as rig:
        call = await rig.fetch()
        await call.begin()
        await call.send(b'data: {"error":{"message":"gone"}}\n\ndata: [DONE]\n\n')
        assert (await rig.said(messages.FetchFailed)).reason == "gone"

        rig.engine.take(messages.ReceiveFailed("r", rig.epoch))

        call = await rig.call()
        assert "kv_transfer_params" not in call.body
        assert call.body["request_id"] == "r-2"
        assert (await rig.made(call, 9)).token_id == 9
        assert rig.reports.load.prompt_tokens == 5, "one prompt, sent twice"


async def test_an_engine_that_waits_for_a_peer_has_nothing_to_compute() -> None:
    async with rigged() as rig:
        await rig.fetch()
        rig.engine.take(messages.Ping())

        assert await rig.said(messages.Pong) == messages.Pong(0, has_work=False)


async def test_kv_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_load, "FETCH_SECONDS", 0.0)
    async with rigged() as rig:
        call = await rig.fetch()
        rig.read_pages()

        assert "no token came" in (await rig.said(messages.FetchFailed)).reason
        await asyncio.wait_for(call.is_broken.wait(), 10)


async def test_kv_that_waits_in_the_engine_s_queue_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_load, "FETCH_SECONDS", 0.0)
    async with rigged() as rig:
        rig.fake.pages["/metrics"] = METRICS.replace('start"} 0.0', 'start"} 1.0').encode()
        call = await rig.fetch()
        rig.read_pages()
        rig.engine.take(messages.Ping())
        await rig.said(messages.Pong)
        await until(lambda: len(rig.stats) >= 2)
        assert (await rig.made(call, 7)).token_id == 7


def without_stages(page: str, **values: float) -> bytes:
    """The page of vLLM 0.31, where `waiting` are queued and `running` run."""
    kept = (line for line in page.splitlines() if "fetch_by_stage" not in line)
    for name, value in values.items():
        kept = [
            f"{line.rsplit(' ', 1)[0]} {value}"
            if line.startswith(f"vllm:num_requests_{name}")
            else line
            for line in kept
        ]
    return "\n".join([*kept, ""]).encode()


@pytest.mark.parametrize(("waiting", "running"), [(1.0, 0.0), (0.0, 8.0)])
async def test_a_page_without_stages_gives_up_none_that_may_wait_for_its_turn(
    monkeypatch: pytest.MonkeyPatch, waiting: float, running: float
) -> None:
    monkeypatch.setattr(engine_load, "FETCH_SECONDS", 0.0)
    async with rigged(max_sequences=8) as rig:
        rig.fake.pages["/metrics"] = without_stages(METRICS, waiting=waiting, running=running)
        await rig.fetch()
        rig.read_pages()
        await until(lambda: len(rig.stats) >= 2)
        assert rig.outputs.empty()

        rig.fake.pages["/metrics"] = without_stages(METRICS, waiting=0.0, running=0.0)

        assert "no token came" in (await rig.said(messages.FetchFailed)).reason


async def test_a_fetch_that_was_aborted_is_not_given_up_in_a_later_request_of_its_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_load, "FETCH_SECONDS", 0.0)
    async with rigged() as rig:
        await rig.fetch()
        rig.engine.take(messages.Abort("r"))
        rig.engine.take(messages.Submit(spec()))
        call = await rig.call()
        rig.read_pages()
        await until(lambda: len(rig.stats) >= 2)
        assert (await rig.made(call, 7)).token_id == 7


async def test_an_answer_that_broke_off_is_no_failure_of_a_later_request_of_its_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rigged() as rig:
        looked, resubmitted = asyncio.Event(), asyncio.Event()

        async def is_alive(_reason: str) -> bool:
            looked.set()
            await resubmitted.wait()
            return True

        monkeypatch.setattr(rig.page, "is_alive", is_alive)
        rig.engine.take(messages.Submit(spec()))
        (await rig.call()).cut()
        await asyncio.wait_for(looked.wait(), 10)
        rig.engine.take(messages.Abort("r"))
        rig.engine.take(messages.Submit(spec()))
        resubmitted.set()
        await rig.first_token()


async def test_an_error_after_the_first_fetched_token_fails_the_request() -> None:
    async with rigged() as rig:
        ready = await rig.ready_to_fetch(spec())
        rig.engine.take(messages.Fetch("r", ready.epoch, encode_handle(KvTransferParams(TRANSFER))))
        call = await rig.first_token()
        call.cut()

        await rig.said(messages.RequestFailed)


async def test_stale_messages_of_a_transfer_change_nothing() -> None:
    async with rigged() as rig:
        ready = await rig.ready_to_fetch(spec())
        rig.engine.take(messages.Fetch("r", b"x" * 16, encode_handle(KvTransferParams(TRANSFER))))
        rig.engine.take(messages.ReceiveFailed("other", ready.epoch))
        rig.engine.take(messages.Abort("r"))
        rig.engine.take(messages.ReceiveFailed("r", ready.epoch))

        assert rig.fake.calls.empty()
        assert rig.reports.load.num_receiving == 0


async def test_a_broken_handle_is_no_kv() -> None:
    async with rigged() as rig:
        ready = await rig.ready_to_fetch(spec())

        nested = b"\x81\xa8transfer" + b"\x81\xa1a" * 5000 + b"\x01"
        for handle in (b"\x01", nested):
            rig.engine.take(messages.Fetch("r", ready.epoch, handle))

            assert "cannot be read" in (await rig.said(messages.FetchFailed)).reason


async def test_room_is_what_the_engine_and_those_that_wait_leave() -> None:
    """16 blocks of 4 tokens, of which a quarter is in use."""
    async with rigged() as rig:
        await rig.ready_to_fetch(spec("a", num_tokens=39))

        rig.engine.take(messages.Receive(spec("b", num_tokens=8)))

        assert (await rig.said(messages.ReceiveRefused)).needed_blocks == 3
        assert rig.stats[-1].free_blocks < 3
        rig.engine.take(messages.Abort("a"))
        await rig.ready_to_fetch(spec("b", num_tokens=8))


async def read_page(rig: Rig, **values: float) -> None:
    """Have a page read whose lines with those names have other values."""
    page = METRICS
    for name, value in values.items():
        lines = [line for line in page.splitlines() if name in line and line.startswith("vllm:")]
        for line in lines:
            page = page.replace(line, f"{line.rsplit(' ', 1)[0]} {value}")
    rig.fake.pages["/metrics"] = page.encode()
    pages = asyncio.Event()
    give_up, rig.reports.on_page = rig.reports.on_page, pages.set
    rig.read_pages()
    await asyncio.wait_for(pages.wait(), 10)
    rig.reports.on_page = give_up


async def test_fetches_in_the_engine_s_queue_keep_their_room() -> None:
    """A quarter of 16 blocks is in use, before and after the fetch of 10 is asked for."""
    async with rigged() as rig:
        await rig.fetch(spec("a", num_tokens=39))
        await read_page(rig, num_requests_waiting=1.0, waiting_to_start=1.0)

        rig.engine.take(messages.Receive(spec("b", num_tokens=39)))

        assert (await rig.said(messages.ReceiveRefused)).needed_blocks == 10


async def test_without_stages_all_that_is_queued_may_be_fetches() -> None:
    async with rigged() as rig:
        rig.fake.pages["/metrics"] = without_stages(METRICS, waiting=1.0)
        await rig.fetch(spec("a", num_tokens=39))
        rig.read_pages()
        await until(lambda: len(rig.stats) >= 2)

        rig.engine.take(messages.Receive(spec("b", num_tokens=39)))

        assert (await rig.said(messages.ReceiveRefused)).needed_blocks == 10


async def test_a_fetch_that_has_left_the_queue_is_counted_by_the_page_alone() -> None:
    async with rigged() as rig:
        await rig.fetch(spec("a", num_tokens=19))
        await read_page(rig, num_requests_waiting=0.0, kv_cache_usage_perc=0.5)

        await rig.ready_to_fetch(spec("b", num_tokens=28))


async def test_prompts_in_the_engine_s_queue_keep_their_room() -> None:
    async with rigged() as rig:
        rig.engine.take(messages.Submit(spec("a", num_tokens=39)))
        await rig.call()
        await read_page(rig, num_requests_waiting=1.0)

        rig.engine.take(messages.Receive(spec("b", num_tokens=39)))

        assert (await rig.said(messages.ReceiveRefused)).needed_blocks == 10


async def test_there_is_room_for_as_many_requests_as_it_runs() -> None:
    async with rigged(max_sequences=2) as rig:
        for name in ("a", "b"):
            await rig.ready_to_fetch(spec(name))

        rig.engine.take(messages.Receive(spec("c")))

        refused = await rig.said(messages.ReceiveRefused)
        assert refused.request_id == "c"
        # else it would ask again at once, and again
        assert rig.stats[-1].free_blocks < refused.needed_blocks
        rig.engine.take(messages.Abort("a"))
        await rig.ready_to_fetch(spec("c"))


@pytest.mark.parametrize(
    ("num_running", "usage", "kept_seconds", "has_work"),
    [
        pytest.param(0.0, 1.0, 600.0, False, id="full of kept KV"),
        pytest.param(1.0, 1.0, 600.0, True, id="it computes"),
        pytest.param(0.0, 0.5, 600.0, True, id="there is room"),
        pytest.param(0.0, 1.0, 0.0, True, id="for too long"),
    ],
)
async def test_prompts_that_wait_for_kept_kv_are_no_stall(
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_running: float,
    usage: float,
    kept_seconds: float,
    has_work: bool,
) -> None:
    monkeypatch.setattr("pdcluster_worker.stock_engine.reports.KEPT_SECONDS", kept_seconds)
    async with rigged() as rig:
        rig.engine.take(messages.Prefill(spec("kept"), TARGET))
        await (await rig.call()).answer(prefill_answer())
        await rig.said(messages.PrefillDone)
        rig.engine.take(messages.Prefill(spec("waiting"), TARGET))
        await rig.call()
        await read_page(
            rig,
            num_requests_running=num_running,
            num_requests_waiting=1.0,
            kv_cache_usage_perc=usage,
        )

        rig.engine.take(messages.Ping())

        assert (await rig.said(messages.Pong)).has_work is has_work


async def test_a_prompts_logprobs_come_before_its_stream() -> None:
    async with rigged() as rig:
        rig.engine.take(messages.Submit(spec(prompt_logprobs=0)))
        call = await rig.call()
        assert "stream" not in call.body
        await call.answer(b'{"prompt_logprobs":[null,{"3":{"logprob":-0.5,"rank":2}}]}')
        call = await rig.call()
        await call.begin()
        await call.send(tokens_event(7))

        (token,) = (await rig.said(messages.Tokens)).tokens

        assert [(one.logprob, one.rank) for one in token.prompt_logprobs] == [(-0.5, 2)]


async def test_a_ping_says_whether_there_is_work_and_how_far_it_is() -> None:
    async with rigged() as rig:
        await read_page(rig, num_requests_running=0.0)
        rig.engine.take(messages.Ping())
        assert await rig.said(messages.Pong) == messages.Pong(0, has_work=False)
        rig.engine.take(messages.Submit(spec()))
        await rig.first_token()
        rig.engine.take(messages.Ping())

        assert await rig.said(messages.Pong) == messages.Pong(1, has_work=True)


@pytest.mark.parametrize(("num_running", "has_work"), [(1.0, True), (0.0, False)])
async def test_an_engine_that_still_runs_what_was_aborted_is_not_idle(
    *, num_running: float, has_work: bool
) -> None:
    async with rigged() as rig:
        rig.engine.take(messages.Submit(spec()))
        await rig.first_token()
        rig.engine.take(messages.Abort("r"))
        await read_page(rig, num_requests_running=num_running)

        rig.engine.take(messages.Ping())

        assert (await rig.said(messages.Pong)).has_work is has_work


async def test_a_ping_that_comes_while_the_page_does_not_is_answered_with_the_page() -> None:
    async with rigged() as rig:
        page = rig.fake.pages.pop("/metrics").replace(
            b'model_name="m"} 1.0', b'model_name="m"} 0.0'
        )
        rig.read_pages()
        async with asyncio.timeout(10):
            while not rig.page.is_silent:
                await asyncio.sleep(0.01)
        rig.engine.take(messages.Ping())
        assert rig.outputs.empty()

        rig.fake.pages["/metrics"] = page

        assert await rig.said(messages.Pong) == messages.Pong(0, has_work=False)


async def test_both_legs_are_of_the_request_s_trace() -> None:
    parent = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "x=1"}
    async with rigged() as rig:
        rig.traces["r"] = parent
        rig.engine.take(messages.Prefill(spec(), TARGET))
        prefill = await rig.call()
        rig.engine.take(messages.Abort("r"))
        ready = await rig.ready_to_fetch(spec())
        rig.engine.take(messages.Fetch("r", ready.epoch, encode_handle(KvTransferParams(TRANSFER))))
        decode = await rig.call()
        rig.engine.take(messages.Submit(spec("untraced")))
        untraced = await rig.call()

    for call in (prefill, decode):
        assert parent.items() <= call.headers.items()
    assert not parent.keys() & untraced.headers.keys()


async def test_a_prefill_is_timed_where_no_other_prompt_waited() -> None:
    async with rigged() as rig:
        for name in ("first", "second"):
            rig.engine.take(messages.Submit(spec(name)))
        times = {}
        for _ in range(2):
            call = await rig.call()
            token = await rig.made(call, 7)
            times[token.request_id] = token.queue_seconds, token.prefill_seconds

    queue_seconds, prefill_seconds = times["first"]
    assert queue_seconds == 0.0
    assert prefill_seconds is not None
    assert prefill_seconds > 0
    assert times["second"] == (None, None)


@pytest.mark.parametrize(
    ("max_sequences", "num_tokens", "is_timed"),
    [(8, 5, True), (1, 5, False), (8, 45, False)],
    ids=["with room", "as many requests as it runs", "more tokens than blocks are free for"],
)
async def test_a_prefill_is_timed_where_it_waits_for_no_room(
    max_sequences: int, num_tokens: int, *, is_timed: bool
) -> None:
    async with rigged(max_sequences) as rig:
        rig.engine.take(messages.Submit(spec("running")))
        await rig.first_token()
        rig.engine.take(messages.Submit(spec("late", num_tokens)))
        call = await rig.call()
        token = await rig.made(call, 7)

    assert (token.prefill_seconds is not None) is is_timed
    assert token.queue_seconds == (0.0 if is_timed else None)


async def test_the_time_of_a_peer_s_prefill_comes_with_its_kv() -> None:
    async with rigged() as rig:
        rig.engine.take(messages.Prefill(spec(), TARGET))
        await (await rig.call()).answer(prefill_answer())
        done = await rig.said(messages.PrefillDone)
        ready = await rig.ready_to_fetch(spec())
        rig.engine.take(messages.Fetch("r", ready.epoch, done.handle))
        call = await rig.call()
        await call.begin()
        await call.send(tokens_event(7))

        (first,) = (await rig.said(messages.Tokens)).tokens

    seconds = decode_handle(done.handle).prefill_seconds
    assert seconds is not None
    assert first.prefill_seconds == seconds > 0


async def test_an_engine_that_refuses_its_port_is_gone() -> None:
    async with fake_vllm() as fake:
        rig = Rig(fake)
    reading = asyncio.create_task(rig.page.run())
    try:
        await until(lambda: rig.gone)
    finally:
        reading.cancel()

    assert "does not listen any more" in rig.gone[0]


async def test_an_engine_that_was_started_again_is_another_one() -> None:
    async with rigged() as rig:
        rig.fake.pages["/metrics"] = METRICS.replace("1.79542970805e+09", "1.8e+09").encode()
        reading = asyncio.create_task(rig.page.run())
        try:
            async with asyncio.timeout(10):
                while not rig.gone:
                    await asyncio.sleep(0.01)
        finally:
            reading.cancel()

    assert rig.gone[0] == "it was started again"


@pytest.mark.parametrize("num_tokens", [1, 4, 5])
async def test_a_reported_request_is_known(num_tokens: int) -> None:
    async with rigged() as rig:
        rig.engine.take(messages.Submit(spec(num_tokens=num_tokens)))
        await rig.call()
        async with asyncio.timeout(10):
            while not rig.stats:
                await asyncio.sleep(0.01)

    (stats, *_) = rig.stats
    assert (stats.num_inputs, stats.num_waiting) == (1, 1)
    assert stats.waiting_tokens == num_tokens
    assert sum(stats.blocks.values()) == 16


class InstantHttp(StockClient):
    """Answers with the numbers at the loop's next turn."""

    num_read = 0
    page = METRICS

    async def get(self, path: str) -> bytes:
        self.num_read += 1
        await asyncio.sleep(0)
        return self.page.encode()


async def test_no_cancellation_is_lost_whenever_it_comes() -> None:
    first = read_numbers(METRICS.encode())
    for turns in range(8):
        page = StockMetrics(InstantHttp(1), [first], lambda _: None)
        Reports(page, 0, lambda _: None, max_sequences=8)
        reading = asyncio.create_task(page.run())
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()

        await asyncio.wait([reading], timeout=1)

        is_cancelled = reading.cancelled()
        reading.cancel()
        assert is_cancelled, turns


async def test_the_page_of_a_rested_engine_is_not_read_with_its_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_page, "BUSY_SECONDS", 3600.0)
    client = InstantHttp(1)
    client.page = re.sub(r"(num_requests_\w+\{.*\}) .*", r"\1 0.0", METRICS)
    page = StockMetrics(client, [read_numbers(METRICS.encode())], lambda _: None)
    reports = Reports(page, 0, lambda _: None, max_sequences=8)
    reading = asyncio.create_task(page.run())
    await some_turns()
    reports.load.begun("r", 4)
    reports.changed()
    await some_turns()
    reading.cancel()
    reports.close()

    assert client.num_read == 1


async def some_turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)
