"""Choice of the decode worker that runs a request, and what happens when that worker fails."""

import asyncio
import gc
import sys
import weakref
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from msgspec.structs import replace

from pdcluster_schema.qos import EstimationSpec
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.engine import Submit, Tokens
from pdcluster_worker.messages.peers import Generated, PrefillMode, WorkerLoad
from pdcluster_worker.messages.requests import RequestSpec, Token
from pdcluster_worker.serving.ingress.ingress import Ingress
from tests.worker.serving.ingress.ingresses import DecodePeer, busy_here, make_ingress, spec


async def collect(ingress: Ingress, *specs: RequestSpec) -> list[tuple[int, int]]:
    return [(g.index, g.token.token_id) async for g in ingress.generate(list(specs), "auto")]


async def test_ingress_keeps_a_request_that_it_can_serve_as_well(worker, engine):
    peer = DecodePeer()

    assert await collect(make_ingress(worker, engine, peer), spec()) == [(0, 7), (0, 8)]
    assert not peer.requested


async def test_token_of_a_lone_choice_passes_three_generators(worker, engine):
    begun: list[AsyncGenerator[Any, Any]] = []
    ingress, hooks = make_ingress(worker, engine), sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(firstiter=begun.append)
    async with aclosing(ingress.generate([spec()], "auto")) as tokens:
        for _ in range(2):
            await anext(tokens)
        passed = [generator.__qualname__ for generator in begun if generator.ag_frame is not None]
    sys.set_asyncgen_hooks(*hooks)

    assert passed == ["Ingress.generate", "Migration.run", "DecodeDispatcher.run"]


class KeepingReader:
    """Takes all tokens."""

    is_open = True

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, item: Generated) -> None:
        self.taken.append(item.token.token_id)


async def test_reader_takes_later_tokens_of_a_lone_choice_and_the_last_is_the_streams(
    worker, engine
):
    ingress, reader = make_ingress(worker, engine), KeepingReader()
    engine.answer = lambda message: (
        [Tokens([Token(message.spec.request_id, 7)])] if isinstance(message, Submit) else ()
    )
    async with aclosing(ingress.generate([spec()], "auto", reader=reader)) as tokens:
        first = await anext(tokens)
        waiting = asyncio.ensure_future(anext(tokens))
        await asyncio.sleep(0)
        engine.say(Tokens([Token("r", 8), Token("r", 9)]))
        engine.say(Tokens([Token("r", 10, finish_reason="length")]))
        last = await waiting

    assert (first.token.token_id, reader.taken, last.token.token_id) == (7, [8, 9], 10)


async def test_leg_after_one_that_was_read_begins_with_all_its_tokens(worker, engine):
    peer = DecodePeer(Generated(Token("r", 9, finish_reason="stop")))
    ingress, reader = make_ingress(worker, engine, peer), KeepingReader()
    engine.answer = lambda message: (
        [Tokens([Token(message.spec.request_id, 7)])] if isinstance(message, Submit) else ()
    )
    async with aclosing(ingress.generate([spec()], "auto", reader=reader)) as tokens:
        await anext(tokens)
        waiting = asyncio.ensure_future(anext(tokens))
        await asyncio.sleep(0)
        engine.say(Tokens([Token("r", 8)]))
        while not reader.taken:
            await asyncio.sleep(0)
        next(iter(worker.engines)).client.stall("it stalls")
        moved = await waiting

    assert (reader.taken, peer.outputs, moved.token.token_id) == ([8], [[7, 8]], 9)


async def test_reader_is_let_go_with_its_request_and_without_a_collection(worker, engine):
    ingress, reader = make_ingress(worker, engine), KeepingReader()
    kept = weakref.ref(reader)
    gc.disable()
    try:
        async with aclosing(ingress.generate([spec()], "auto", reader=reader)) as tokens:
            await anext(tokens)
            del reader
            assert kept() is not None
        assert kept() is None
    finally:
        gc.enable()


async def test_reader_takes_no_tokens_of_a_peer(worker, engine):
    peer = DecodePeer(
        *(Generated(Token("r", number)) for number in (5, 6)),
        Generated(Token("r", 7, finish_reason="stop")),
    )
    ingress, reader = make_ingress(worker, engine, peer), KeepingReader()
    busy_here(ingress)
    async with aclosing(ingress.generate([spec()], "auto", reader=reader)) as tokens:
        await anext(tokens)
        later = [generated.token.token_id async for generated in tokens]

    assert (later, reader.taken) == ([6, 7], [])


@pytest.mark.parametrize(
    "error",
    [
        PeerError("connection refused"),
        RequestError("the engine of this worker stopped", status=503, code="engine_dead"),
        RequestError("the engine of this worker has stalled", status=503, code="engine_stalled"),
        RequestError("this worker is draining", status=503, code="draining"),
        RequestError("too many wait", status=503, code="queue_full"),
    ],
    ids=lambda e: getattr(e, "code", None) or "lost",
)
async def test_ingress_peer_that_fails_before_the_first_token_means_another_try(
    worker, engine, error
):
    peer = DecodePeer(error)
    ingress = make_ingress(worker, engine, peer)
    busy_here(ingress)

    assert await collect(ingress, spec()) == [(0, 7), (0, 8)]
    assert peer.requested == ["r"]


class SlowToClose(DecodePeer):
    """A decode worker whose calls give a token, then nothing, and take long to close."""

    async def generate(
        self, spec: RequestSpec, prefill: PrefillMode
    ) -> AsyncGenerator[Generated, None]:
        try:
            yield Generated(Token(spec.request_id, 5), "local")
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()


async def test_ingress_forgets_choices_whose_closing_is_cut_off(worker, engine):
    ingress = make_ingress(worker, engine, SlowToClose())
    busy_here(ingress)
    request = asyncio.create_task(collect(ingress, spec("a"), spec("b")))
    while not ingress._choices:
        await asyncio.sleep(0)
    for _ in range(2):
        request.cancel()
        await asyncio.sleep(0.01)

    assert request.cancelled()
    assert not ingress._choices


async def test_ingress_fault_of_the_request_itself_is_not_tried_again(worker, engine):
    peer = DecodePeer(RequestError("bad", status=400))
    ingress = make_ingress(worker, engine, peer)
    busy_here(ingress)
    with pytest.raises(RequestError, match="bad"):
        await collect(ingress, spec())

    assert not engine.inputs


async def test_ingress_of_a_draining_worker_relays_what_comes_and_counts_it(worker, engine):
    worker.announce("draining")
    peer = DecodePeer(
        Generated(Token("r", 5), "local"), Generated(Token("r", 6, finish_reason="stop"))
    )
    peer.load = WorkerLoad(num_running=100)  # whatever its load: this worker runs nothing new
    tokens = make_ingress(worker, engine, peer).generate([spec()], "auto")
    async with aclosing(tokens):
        assert (await anext(tokens)).token.token_id == 5
        assert worker.active == 1
        assert [g.token.token_id async for g in tokens] == [6]

    assert worker.active == 0
    assert not engine.inputs


@pytest.mark.parametrize("state", ["draining", "drained"])
async def test_ingress_of_a_draining_worker_without_a_peer_names_another_way(worker, engine, state):
    worker.announce(state)
    begun: list[int] = []
    worker.on_request = lambda: begun.append(1)
    with pytest.raises(RequestError, match=state) as caught:
        await collect(make_ingress(worker, engine), spec())

    assert (caught.value.status, caught.value.code, caught.value.retry_after_seconds) == (
        503,
        "draining",
        1,
    )
    assert (begun, engine.inputs) == ([], [])  # a refusal holds no drain


async def test_request_that_comes_before_a_drain_is_noticed_runs_here_if_no_peer_takes_it(
    worker, engine
):
    worker.announce("drained")
    worker.is_drain_noticed = lambda: False
    peer = DecodePeer(Generated(Token("r", 6, finish_reason="stop"), "local"))

    assert await collect(make_ingress(worker, engine, peer), spec()) == [(0, 6)]
    assert not engine.inputs
    assert await collect(make_ingress(worker, engine), spec()) == [(0, 7), (0, 8)]


async def test_ingress_of_a_draining_worker_tries_every_peer(worker, engine):
    worker.announce("draining")
    broken = DecodePeer(PeerError("connection refused"), key="a")
    full = DecodePeer(RequestError("too many wait", status=503, code="queue_full"), key="b")
    good = DecodePeer(Generated(Token("r", 5, finish_reason="stop"), "local"), key="c")
    good.load = WorkerLoad(num_running=9)

    assert await collect(make_ingress(worker, engine, broken, full, good), spec()) == [(0, 5)]
    assert (len(broken.requested), len(full.requested), len(good.requested)) == (1, 1, 1)


async def test_ingress_of_a_draining_worker_says_why_its_last_peer_refused(worker, engine):
    worker.announce("draining")
    lost = DecodePeer(PeerError("connection refused"), key="a")
    full = DecodePeer(
        RequestError("too many wait", status=503, code="queue_full", retry_after_seconds=1), key="b"
    )
    full.load = WorkerLoad(num_running=1)
    with pytest.raises(RequestError, match="too many wait") as caught:
        await collect(make_ingress(worker, engine, lost, full), spec())

    assert (caught.value.code, caught.value.retry_after_seconds, worker.active) == (
        "queue_full",
        1,
        0,
    )


@pytest.mark.parametrize(
    "change", [("ready", "draining"), ("draining", "ready")], ids=lambda change: change[0]
)
async def test_ingress_runs_here_what_came_or_failed_while_it_was_ready(worker, engine, change):
    """A drain that begins later lets the request go on; one that was withdrawn is over."""
    before, after = change
    worker.announce(before)

    class Failing(DecodePeer):
        async def generate(
            self, spec: RequestSpec, prefill: PrefillMode
        ) -> AsyncGenerator[Generated, None]:
            worker.announce(after)
            raise PeerError("connection refused")
            yield

    ingress = make_ingress(worker, engine, Failing())
    busy_here(ingress)

    assert await collect(ingress, spec()) == [(0, 7), (0, 8)]


async def test_ingress_admits_all_choices_of_a_prompt_as_one(worker, engine):
    worker.policy = type(worker.policy)(
        admission=type(worker.policy.admission)(max_queued_requests=1)
    )
    tokens = await collect(make_ingress(worker, engine), spec("a"), spec("b"), spec("c"))

    assert sorted(tokens) == [(0, 7), (0, 8), (1, 7), (1, 8), (2, 7), (2, 8)]


async def test_ingress_runs_a_lone_choice_in_its_readers_task(worker, engine):
    ingress = make_ingress(worker, engine)
    before = asyncio.all_tasks()
    async with aclosing(ingress.generate([spec()], "auto")) as tokens:
        async for _ in tokens:
            assert asyncio.all_tasks() == before
    ingress.abort("r")


async def test_ingress_asks_a_peer_when_a_deadline_cannot_be_met_here(worker, engine):
    estimation = EstimationSpec(
        estimator="rwt", preset_token_milliseconds=1e6, reject_unmeetable=True
    )
    worker.policy = worker.policy.model_copy(update={"estimation": estimation})
    hasty = replace(spec(), deadline_seconds=1.0)
    peer = DecodePeer(Generated(Token("r", 5, finish_reason="stop"), "local"))

    assert await collect(make_ingress(worker, engine, peer), hasty) == [(0, 5)]
    alone = make_ingress(worker, engine)
    alone._clock = lambda: 0.0
    with pytest.raises(RequestError, match="after the deadline of 1 s") as refused:
        await collect(alone, hasty)
    assert (refused.value.status, refused.value.code) == (503, "deadline_unmeetable")
    assert not engine.inputs
