"""A request that has begun goes on at another worker: what the next one is asked, and what the
client sees [O8].
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from pdcluster_schema.qos import AdmissionSpec
from pdcluster_schema.routing import MovingSpec
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import (
    Abort,
    EngineInput,
    EngineOutput,
    EngineStats,
    Preempted,
    Submit,
)
from pdcluster_worker.messages.peers import Generated, Hello, PrefillMode, WorkerLoad
from pdcluster_worker.messages.requests import Constraint, RequestSpec
from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.serving.engines.client import EngineClient
from pdcluster_worker.serving.engines.engines import Engine
from pdcluster_worker.serving.ingress.attempt import RequestProgress
from pdcluster_worker.serving.ingress.decode_router import LOCAL
from pdcluster_worker.serving.ingress.ingress import Ingress
from pdcluster_worker.serving.ingress.migration import Migration
from pdcluster_worker.serving.peer_handler import PeerRequestHandler
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.tracing import request_trace
from tests.worker.serving.doubles import FACTS, ScriptedEngine, stats, until
from tests.worker.serving.ingress.ingresses import busy_here, make_ingress
from tests.worker.serving.ingress.moving_model import (
    WHOLE,
    Model,
    collect,
    counted,
    ids,
    model_here,
    spec,
    two_peers,
)


class BreaksAtTheEnd(Model):
    """Its call fails after the last token."""

    async def generate(
        self, spec: RequestSpec, prefill: PrefillMode
    ) -> AsyncGenerator[Generated, None]:
        async with aclosing(super().generate(spec, prefill)) as tokens:
            async for generated in tokens:
                yield generated
        raise self.error


def ingress_of(worker: WorkerContext, engine: ScriptedEngine, *peers: Model) -> Ingress:
    """One that had rather not run anything here."""
    ingress = make_ingress(worker, engine, *peers)
    engine.answer = model_here
    busy_here(ingress)
    return ingress


async def test_moved_request_goes_on_where_it_was(worker, engine):
    first, second = two_peers(ends_after=2)
    with request_trace.begin_trace("r") as told:
        made = await collect(ingress_of(worker, engine, first, second))

    assert ids(made) == WHOLE
    assert (first.requested, second.requested) == (["r"], ["r~1"])  # another request for its blocks
    assert second.outputs == [[10, 11]]
    assert [event.facts for event in told.events if event.name == "move"] == [
        {"reason": "lost", "left": "a", "goes_to": "b", "tokens": 2, "moves": 1}
    ]
    assert counted(worker) == {("lost", "moved"): 1}


async def test_moved_request_looks_like_one_to_its_reader(worker, engine):
    made = await collect(ingress_of(worker, engine, Model("a", ends_after=2)))

    assert {g.token.request_id for g in made} == {"r"}
    assert [g.prefill for g in made] == ["local"] + [None] * 5
    # of another worker's queue
    assert [g.token.queue_seconds is None for g in made[2:]] == [True] * 4
    assert [g.token.logprob for g in made] == [-0.5 * position for position in range(6)]


async def test_request_that_has_ended_is_not_moved(worker, engine):
    """Its worker is lost before the call is over."""
    first, second = BreaksAtTheEnd("a"), Model("b")
    second.load = WorkerLoad(num_running=1)

    assert ids(await collect(ingress_of(worker, engine, first, second))) == WHOLE
    assert (second.requested, engine.inputs, counted(worker)) == ([], [], {})


async def test_moved_request_whose_prefill_was_forced_goes_by_the_rule(worker, engine):
    first, second = two_peers(ends_after=1)
    await collect(ingress_of(worker, engine, first, second), prefill="remote")

    assert (first.modes, second.modes) == (["remote"], ["auto"])


async def test_move_without_a_worker_left_is_a_clean_error(worker, engine):
    ingress = ingress_of(worker, engine, Model("a", ends_after=1))
    tokens = ingress.generate([spec()], "auto")
    async with aclosing(tokens):
        await anext(tokens)
        worker.engines.first.client.stall("it has stalled")
        with pytest.raises(RequestError, match="was lost: reset"):
            await anext(tokens)

    assert counted(worker) == {("lost", "nowhere"): 1}


async def test_answer_of_an_engine_here_that_is_given_up_goes_on_elsewhere(worker, engine):
    peer = Model("a")
    ingress = make_ingress(worker, engine, peer)
    engine.answer = lambda message: model_here(message)[:1]
    made = []
    async with aclosing(ingress.generate([spec()], "auto")) as tokens:
        made.append(await anext(tokens))
        worker.engines.first.client.give_up("another rank is lost")
        made += [token async for token in tokens]

    assert (ids(made, 0), len(peer.requested)) == (WHOLE, 1)


@pytest.mark.parametrize(("size", "is_up"), [(1, False), (2, True)])
async def test_answer_of_a_lost_rank_goes_back_where_another_one_serves(worker, size, is_up):
    for rank in range(1, size):
        worker.engines.add(Engine(EngineClient(), FACTS, "h:1", rank))
    progress = RequestProgress(spec(), "auto", lambda: 0.0, 0.0, failed={LOCAL})

    # looks at the worker and the request alone, so no dispatcher and no router are needed
    migration = Migration(worker, None, list, None)  # type: ignore[arg-type]
    assert migration._is_up(progress) is is_up


async def test_move_that_a_worker_refuses_for_the_requests_own_fault_is_not_tried_again(
    worker, engine
):
    second = Model("b", ends_after=0, error=RequestError("bad", status=400))
    second.load = WorkerLoad(num_running=1)
    with pytest.raises(RequestError, match="bad"):
        await collect(ingress_of(worker, engine, Model("a", ends_after=1), second))


async def test_choices_that_begin_later_begin_where_the_first_has_gone(worker, engine):
    first, second = two_peers(ends_after=1)
    made = await collect(ingress_of(worker, engine, first, second), spec("x"), spec("y"))

    assert (ids(made, 0), ids(made, 1)) == (WHOLE, WHOLE)
    assert (first.requested, second.requested) == (["x"], ["x~1", "y"])


async def test_choices_are_tried_elsewhere_before_their_first_token(worker, engine):
    first, second = two_peers(ends_after=0)
    worker.announce("draining")
    made = await collect(ingress_of(worker, engine, first, second), spec("x"), spec("y"))

    assert (ids(made, 0), ids(made, 1)) == (WHOLE, WHOLE)
    assert (first.requested, second.requested) == (["x"], ["x~1", "y"])
    assert counted(worker) == {}


# --- drains ---------------------------------------------------------------------------------------


def drain(ingress: Ingress, peer: Model) -> None:
    peer.is_draining = True
    ingress._migration.on_change()


async def waiting(
    ingress: Ingress, peer: Model, *specs: RequestSpec
) -> "asyncio.Task[list[Generated]]":
    """A request that has got as far as it gets at that worker."""
    requested = asyncio.create_task(collect(ingress, *specs))
    await until(lambda: peer.num_open == 1)
    for _ in range(5):
        await asyncio.sleep(0)
    return requested


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_request_leaves_a_worker_that_drains_while_it_waits_for_a_token(
    worker, engine, num_tokens
):
    first, second = two_peers()
    first.waits_at = num_tokens
    ingress = ingress_of(worker, engine, first, second)
    worker.announce("draining")  # so that nothing is tried again here
    requested = await waiting(ingress, first)
    drain(ingress, first)
    while first.num_open:  # its record says so too, and its reports do again
        ingress.on_change()
        await asyncio.sleep(0)

    assert ids(await requested) == WHOLE
    assert (first.num_open, second.outputs) == (0, [WHOLE[:num_tokens]])
    # whose KV it may read, once there is some
    assert second.holders == (["a"] if num_tokens else [""])
    assert counted(worker) == ({("draining", "moved"): 1} if num_tokens else {})


async def test_request_leaves_a_draining_worker_between_two_tokens(worker, engine):
    first, second = two_peers()
    ingress = ingress_of(worker, engine, first, second)
    made: list[int] = []
    async with aclosing(ingress.generate([spec()], "auto")) as tokens:
        async for generated in tokens:
            made.append(generated.token.token_id)
            if len(made) == 2:
                drain(ingress, first)

    assert (made, second.outputs, first.num_open) == (WHOLE, [[10, 11]], 0)


STRUCTURED = replace(
    spec(), sampling=replace(spec().sampling, constraint=Constraint("json_object"))
)


@pytest.mark.parametrize(
    ("restarts_grammar", "num_tokens", "outputs"),
    [(True, 2, []), (True, 0, [[]]), (False, 2, [WHOLE[:2]])],
    ids=["begun", "not begun", "another engine"],
)
async def test_structured_answer_stays_at_a_draining_worker_whose_peers_cannot_go_on_with_it(
    worker, engine, restarts_grammar, num_tokens, outputs
):
    first, second = two_peers(restarts_grammar=restarts_grammar)
    first.waits_at = num_tokens
    ingress = ingress_of(worker, engine, first, second)
    worker.announce("draining")
    requested = await waiting(ingress, first, STRUCTURED)
    drain(ingress, first)
    first.goes_on.set()

    assert ids(await requested) == WHOLE
    assert second.outputs == outputs


async def test_structured_answer_that_cannot_go_on_elsewhere_is_lost_with_its_worker(
    worker, engine
):
    first, second = two_peers(restarts_grammar=True, ends_after=2)
    with pytest.raises(RequestError, match="was lost: reset; a structured answer") as caught:
        await collect(ingress_of(worker, engine, first, second), STRUCTURED)

    assert (caught.value.status, caught.value.code) == (503, "decode_worker_lost")
    assert (second.requested, counted(worker)) == ([], {("lost", "refused"): 1})


async def test_structured_answer_of_an_engine_here_that_stalls_is_not_begun_elsewhere(
    worker, engine
):
    worker._facts = replace(worker.engine_ready, restarts_grammar=True)
    peer = Model("a")
    ingress = make_ingress(worker, engine, peer)
    engine.answer = lambda message: model_here(message)[:1]
    async with aclosing(ingress.generate([STRUCTURED], "auto")) as tokens:
        await anext(tokens)
        worker.engines.first.client.stall("it stalls")
        with pytest.raises(RequestError, match="it stalls") as caught:
            await anext(tokens)

    assert (caught.value.status, peer.requested) == (503, [])


@pytest.mark.parametrize("is_off", [True, False], ids=["off", "no peer"])
async def test_request_stays_at_a_draining_worker(worker, engine, is_off):
    first, second = two_peers()
    first.waits_at = 2
    worker.policy = worker.policy.model_copy(update={"moving": MovingSpec(enabled=not is_off)})
    ingress = ingress_of(worker, engine, first, second)
    worker.announce("draining")
    requested = await waiting(ingress, first)
    second.is_draining = not is_off
    drain(ingress, first)
    first.goes_on.set()

    assert ids(await requested) == WHOLE
    assert (first.requested, second.requested, counted(worker)) == (["r"], [], {})


async def test_request_goes_back_to_a_draining_worker_when_no_other_takes_it(worker, engine):
    first, second = Model("a"), Model("b", ends_after=0)
    first.waits_at, second.load = 1, WorkerLoad(num_running=1)
    ingress = ingress_of(worker, engine, first, second)
    worker.announce("draining")
    requested = await waiting(ingress, first)
    first.waits_at = None
    drain(ingress, first)

    assert ids(await requested) == WHOLE
    assert (first.outputs, second.outputs) == ([[], [10]], [[10]])
    assert counted(worker) == {("draining", "nowhere"): 1, ("draining", "moved"): 1}


async def test_request_whose_ingress_drains_too_ends_there_rather_than_nowhere(worker, engine):
    first = Model("a", ends_after=2)
    ingress = ingress_of(worker, engine, first)
    worker.announce("draining")

    assert ids(await collect(ingress)) == WHOLE
    assert isinstance(engine.inputs[0], Submit)


# --- want of blocks -------------------------------------------------------------------------------


def preempting(
    num_tokens: int, num_preemptions: int
) -> Callable[[EngineInput], Sequence[EngineOutput]]:
    """An engine that preempts a request so often after so many tokens, and then would go on with
    it.
    """

    def answer(message: EngineInput) -> Sequence[EngineOutput]:
        if not isinstance(message, Submit):
            return ()
        tokens = model_here(message)
        cut = num_tokens if not message.spec.output else len(tokens)
        preemptions = [Preempted(message.spec.request_id)] * (
            num_preemptions if cut < len(tokens) else 0
        )
        return [*tokens[:cut], *preemptions, *tokens[cut:]]

    return answer


def short_of_blocks(
    worker: WorkerContext, engine: ScriptedEngine, num_preemptions: int, *peers: Model
) -> Ingress:
    worker.policy = worker.policy.model_copy(update={"moving": MovingSpec(after_preemptions=2)})
    ingress = make_ingress(worker, engine, *peers)
    engine.answer = preempting(3, num_preemptions)
    return ingress


def with_room(free_blocks: int) -> Model:
    peer = Model("a")
    peer.load = WorkerLoad(num_running=5, free_blocks=free_blocks, total_blocks=64)
    return peer


async def test_request_that_is_preempted_again_and_again_moves_to_a_worker_with_room(
    worker, engine
):
    peer = with_room(4)  # twice the two blocks of 3 + 3 tokens
    ingress = short_of_blocks(worker, engine, 2, peer)
    engine.answer = lambda message: preempting(3, 2)(message)[:5]  # and no more

    assert ids(await collect(ingress)) == WHOLE
    assert peer.outputs == [[10, 11, 12]]
    assert counted(worker) == {("preempted", "moved"): 1}
    await until(lambda: Abort("r") in engine.inputs)  # it held the request still


@pytest.mark.parametrize(
    ("num_preemptions", "free_blocks"), [(1, 64), (2, 3)], ids=["rarely", "no room"]
)
async def test_preempted_request_waits_for_blocks(worker, engine, num_preemptions, free_blocks):
    peer = with_room(free_blocks)

    assert ids(await collect(short_of_blocks(worker, engine, num_preemptions, peer))) == WHOLE
    assert (peer.requested, counted(worker)) == ([], {})


async def test_preempted_request_goes_back_when_no_other_takes_it(worker, engine):
    peer = with_room(64)
    peer.ends_after = 0

    assert ids(await collect(short_of_blocks(worker, engine, 2, peer))) == WHOLE
    assert (len(peer.requested), counted(worker)) == (
        1,
        {("preempted", "nowhere"): 1, ("preempted", "moved"): 1},
    )


async def test_request_that_is_preempted_before_its_first_token_is_not_begun_again_where_it_was(
    worker, engine
):
    peer = with_room(64)
    ingress = short_of_blocks(worker, engine, 2, peer)
    engine.answer = lambda message: preempting(0, 2)(message)[:2]  # and no more

    assert ids(await collect(ingress)) == WHOLE
    assert peer.outputs == [[]]
    assert len([message for message in engine.inputs if isinstance(message, Submit)]) == 1


async def test_request_that_a_peer_preempts_goes_where_there_is_room(worker, engine):
    first, second = (
        Model("a", ends_after=2, error=RequestError("preempted", status=503, code="out_of_blocks")),
        Model("b"),
    )
    first.load = WorkerLoad(free_blocks=64)
    second.load = WorkerLoad(num_running=1, free_blocks=2)
    ingress = ingress_of(worker, engine, first, second)
    await say(worker, engine, stats(free_blocks=64))

    assert ids(await collect(ingress)) == WHOLE
    assert (len(first.requested), len(second.requested)) == (1, 0)  # this worker alone has room
    assert counted(worker) == {("preempted", "moved"): 1}


async def test_request_that_a_peer_preempts_stays_where_no_worker_has_room(worker, engine):
    first = Model(
        "a", ends_after=2, error=RequestError("preempted", status=503, code="out_of_blocks")
    )
    ingress = ingress_of(worker, engine, first)
    await say(worker, engine, stats(free_blocks=1))

    assert ids(await collect(ingress)) == WHOLE
    assert (len(first.requested), engine.inputs) == (3, [])


async def say(worker: WorkerContext, engine: ScriptedEngine, text: EngineStats) -> None:
    engine.say(text)
    await until(lambda: worker.engines.first.client.stats == text)


# --- at the worker that it goes to ----------------------------------------------------------------


async def test_request_that_has_begun_is_not_admitted_again(worker, engine):
    ingress = make_ingress(worker, engine)
    engine.answer = model_here
    handler = PeerRequestHandler(
        worker, Hello("e", "decode", FACTS.geometry, "w", "r1"), CreditLedger(1), ingress._local
    )
    admission = AdmissionSpec(max_queued_requests=1)
    worker.policy = worker.policy.model_copy(update={"admission": admission})
    ingress._local._admission._meter.joined()  # one waits

    with pytest.raises(RequestError, match="maxQueuedRequests"):
        await anext(handler.generate(spec(), "auto"))
    begun = replace(spec("r~1"), output=WHOLE[:2])
    assert [g.token.token_id async for g in handler.generate(begun, "auto")] == WHOLE[2:]


async def test_moved_request_keeps_its_deadline_and_the_tier_that_it_was_demoted_to(worker, engine):
    now = [100.0]

    class Slow(Model):
        async def generate(
            self, spec: RequestSpec, prefill: PrefillMode
        ) -> AsyncGenerator[Generated, None]:
            specs.append(spec)
            async with aclosing(super().generate(spec, prefill)) as tokens:
                async for generated in tokens:
                    now[0] += 3.0
                    yield replace(generated, degraded=("priority=low",) if self.key == "a" else ())

    specs: list[RequestSpec] = []
    first, second = Slow("a", ends_after=2), Slow("b")
    second.load = WorkerLoad(num_running=1)
    ingress = ingress_of(worker, engine, first, second)
    ingress._clock = lambda: now[0]
    await collect(ingress, replace(spec(), deadline_seconds=20.0))

    assert [(each.deadline_seconds, each.priority) for each in specs] == [(20.0, 0), (14.0, 100)]
