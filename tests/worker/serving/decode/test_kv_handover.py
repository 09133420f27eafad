"""KV of a request that moves is read from the worker that it left: what both sides do, and what
follows where that fails.
"""

import pytest
from msgspec.structs import replace

from pdcluster_schema.policy import OffloadPolicy, PolicyConfig
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.engine import (
    BlockEvents,
    Prefill,
    PrefillDone,
    Receive,
    ReceiveDone,
    ReceiveFailed,
    ReceiveRefused,
    Submit,
    Tokens,
)
from pdcluster_worker.messages.peers import Hello
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token, TransferTarget
from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.peer_handler import PeerRequestHandler
from pdcluster_worker.serving.worker_context import RouterInfo, WorkerContext
from tests.worker.serving.doubles import (
    EPOCH,
    FACTS,
    RecordingPeer,
    ScriptedEngine,
    collect,
    compute,
    dispatcher_of,
    outcomes,
    totals,
)

MOVED = RequestSpec(
    "r~1", list(range(90)), SamplingParams(max_tokens=20, seed=1), output=[1, 2, 3], kv_holder="old"
)
NEXT = Token("r~1", 7)
DONE = PrefillDone("r~1", num_bytes=64, seconds=0.01)
TARGET = TransferTarget(EPOCH, "engine-2", ["127.0.0.1:1"], 0, [1, 2])


@pytest.fixture
def holder() -> RecordingPeer:
    return RecordingPeer("old")


@pytest.fixture
def dispatcher(
    worker: WorkerContext, engine: ScriptedEngine, holder: RecordingPeer
) -> DecodeDispatcher:
    engine.answer = compute
    return dispatcher_of(worker, holder={"old": holder}.get)


def counted(worker: WorkerContext) -> dict[str, float]:
    return totals(worker.metrics.kv_handovers, "outcome")


@pytest.mark.parametrize("mode", ["auto", "local"])
async def test_moved_request_reads_its_kv_without_a_credit(
    dispatcher, engine, holder, worker, mode
):
    holder.replies = [NEXT, DONE]
    made = await collect(dispatcher, MOVED, mode)

    assert [generated.token.token_id for generated in made] == [7, 8]
    assert [type(message) for message in engine.inputs] == [Receive, ReceiveDone]
    assert (holder.claims, holder.released, holder.targets[0].block_ids) == ([], [], [5, 6])
    assert (counted(worker), outcomes(worker)) == ({"ok": 1.0}, {})


async def test_kv_that_the_engines_cannot_move_is_not_requested(dispatcher, engine, holder, worker):
    worker.engines.first.facts = replace(FACTS, transport="")
    made = await collect(dispatcher, MOVED, "auto")

    assert [generated.token.token_id for generated in made] == [7, 8]
    assert ([type(message) for message in engine.inputs], holder.targets) == ([Submit], [])
    assert counted(worker) == {}


async def test_handover_says_nothing_of_how_fast_prefills_are(dispatcher, holder):
    holder.replies = [NEXT, DONE]
    await collect(dispatcher, MOVED, "auto")

    lines = dispatcher._decider._feedback._fits
    assert {side: queue.num_samples for side, queue in lines.items()} == {"local": 0, "remote": 0}


@pytest.mark.parametrize(
    "replies",
    [
        [PeerError("gone")],
        [RequestError("no KV", status=503, code="kv_gone")],
        [NEXT, PeerError("gone")],
        [],
    ],
)
async def test_kv_that_cannot_be_read_is_computed_here(dispatcher, engine, holder, worker, replies):
    holder.replies = list(replies)
    made = await collect(dispatcher, MOVED, "auto")

    assert [generated.token.token_id for generated in made] == [7, 8]
    assert isinstance(engine.inputs[1], ReceiveFailed)
    assert (counted(worker), holder.released) == ({"failed": 1.0}, [])


async def test_request_without_blocks_for_its_kv_waits_in_the_engine(
    dispatcher, engine, holder, worker
):
    engine.answer = lambda message: (
        [ReceiveRefused("r~1", 9)] if isinstance(message, Receive) else compute(message)
    )
    made = await collect(dispatcher, MOVED, "auto")

    assert [generated.token.token_id for generated in made] == [7, 8]
    assert ([type(message) for message in engine.inputs], holder.targets) == ([Receive, Submit], [])
    assert counted(worker) == {}


@pytest.mark.parametrize(
    "changes",
    [{"kv_holder": "gone"}, {"kv_holder": ""}, {"prompt": list(range(60))}],
    ids=["unknown", "none", "short"],
)
async def test_prompt_is_computed_where_nothing_is_to_be_read(dispatcher, engine, holder, changes):
    await collect(dispatcher, replace(MOVED, **changes), "auto")

    assert ([type(message) for message in engine.inputs], holder.targets) == ([Submit], [])


@pytest.mark.parametrize(("most", "num_reads"), [(0.0, 1), (1.0, 0)])
async def test_kv_is_not_read_over_a_way_that_is_too_slow(
    dispatcher, worker, holder, most, num_reads
):
    worker.policy = PolicyConfig(offload=OffloadPolicy(max_transfer_milliseconds=most))
    worker.pair_rates.add("old", num_tokens=1, seconds=1.0)
    holder.replies = [NEXT, DONE]
    await collect(dispatcher, MOVED, "auto")

    assert len(holder.targets) == num_reads


async def test_blocks_that_are_here_are_not_read(dispatcher, engine, worker, holder):
    worker.engines._take_blocks(
        worker.engines.first, BlockEvents(worker.hashes(MOVED)[:10], [], 1, is_cleared=True)
    )
    await collect(dispatcher, MOVED, "auto")

    assert ([type(message) for message in engine.inputs], holder.targets) == ([Submit], [])


# --- the worker that it left ----------------------------------------------------------------------


def handler_of(worker: WorkerContext, dispatcher: DecodeDispatcher) -> PeerRequestHandler:
    return PeerRequestHandler(
        worker, Hello("e", "decode", FACTS.geometry, "w", "r1"), CreditLedger(1), dispatcher
    )


@pytest.mark.parametrize(("num_held", "is_handed_over"), [(12, True), (11, False)])
async def test_worker_hands_over_what_it_holds_at_least_half_of(
    worker, dispatcher, engine, num_held, is_handed_over
):
    handler = handler_of(worker, dispatcher)
    engine.answer = lambda message: [Tokens([NEXT]), DONE] if isinstance(message, Prefill) else []
    worker.engines._take_blocks(
        worker.engines.first, BlockEvents(worker.hashes(MOVED)[:num_held], [], 1, is_cleared=True)
    )

    assert not handler.needs_credit
    if is_handed_over:
        assert [reply async for reply in handler.prefill("d2", MOVED, TARGET)] == [NEXT, DONE]
    else:
        with pytest.raises(
            RequestError, match=r"the KV of 44 of 93 tokens: compute them elsewhere"
        ) as caught:
            await anext(handler.prefill("d2", MOVED, TARGET))
        assert (caught.value.status, caught.value.code, engine.inputs) == (503, "kv_gone", [])


async def test_handover_holds_a_drain(worker, dispatcher, engine):
    handler = handler_of(worker, dispatcher)
    engine.answer = lambda message: [Tokens([NEXT])] if isinstance(message, Prefill) else []
    worker.engines._take_blocks(
        worker.engines.first, BlockEvents(worker.hashes(MOVED), [], 1, is_cleared=True)
    )
    replies = handler.prefill("d2", MOVED, TARGET)

    assert await anext(replies) == NEXT
    assert worker.active == 1
    await replies.aclose()
    assert worker.active == 0


async def test_router_hands_over_nothing(worker, dispatcher):
    worker.engineless = RouterInfo("w", worker.block_size)
    handler = PeerRequestHandler(
        worker, Hello("w", "router", FACTS.geometry, "", "r1"), CreditLedger(1), dispatcher
    )

    with pytest.raises(RequestError, match="this is a router worker: it prefills for no peer"):
        await anext(handler.prefill("d2", MOVED, TARGET))
