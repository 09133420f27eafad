"""Requests of a stalled engine: the prefill worker's, a peer's, or ours."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import (
    Abort,
    EngineInput,
    EngineOutput,
    PrefillDone,
    Receive,
    ReceiveFailed,
    ReceiveReady,
    ReceiveRefused,
    Submit,
    Tokens,
)
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token, TransferTarget
from pdcluster_worker.serving.decode import remote_prefill
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.engines import stall_watch
from pdcluster_worker.serving.engines.client import EngineStalledError
from pdcluster_worker.serving.ingress.ingress import Ingress
from pdcluster_worker.serving.worker_context import WorkerContext
from tests.worker.serving.doubles import (
    RecordingPeer,
    ScriptedEngine,
    client_of,
    dispatcher_of,
    outcomes,
)
from tests.worker.serving.ingress.ingresses import DecodePeer

EPOCH = b"e" * 16
SPEC = RequestSpec("r", list(range(10)), SamplingParams(max_tokens=3, seed=1))
STALLED = RequestError("the engine of this worker has stalled", status=503, code="engine_stalled")


class SilentPeer(RecordingPeer):
    """A prefill worker that plays its replies and then says nothing more."""

    async def prefill(
        self, spec: RequestSpec, target: TransferTarget
    ) -> AsyncGenerator[Token | PrefillDone, None]:
        async for reply in super().prefill(spec, target):
            yield reply
        await asyncio.Event().wait()


def serve(message: EngineInput) -> Sequence[EngineOutput]:
    """An engine with room that computes what is left to it, whole."""
    match message:
        case Receive(spec=spec):
            return [ReceiveReady(spec.request_id, EPOCH, 4, [5, 6])]
        case Submit(spec=spec):
            return [Tokens([Token(spec.request_id, 8, finish_reason="length")])]
        case ReceiveFailed(request_id=request_id):
            return [Tokens([Token(request_id, 8, finish_reason="length")])]
    return []


@pytest.fixture
def peer() -> SilentPeer:
    return SilentPeer("p", grants=True)


@pytest.fixture
def dispatcher(worker: WorkerContext, engine: ScriptedEngine, peer: SilentPeer) -> DecodeDispatcher:
    engine.answer = serve
    worker.policy = type(worker.policy)(
        offload=type(worker.policy.offload)(prefill_length_threshold=0), stall_seconds=1
    )
    return dispatcher_of(worker, [peer])


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other at once, and each counts for a second without progress."""
    monkeypatch.setattr(remote_prefill, "period_seconds", lambda stall_seconds: 0.0)
    monkeypatch.setattr(stall_watch.StallTimer, "poll", _one_second_more)


def _one_second_more(still: stall_watch.StallTimer, period: float) -> float:
    still.seconds += 1.0
    return still.seconds


async def collect(dispatcher: DecodeDispatcher, prefill: PrefillMode) -> list[Generated]:
    async with asyncio.timeout(5):
        return [generated async for generated in dispatcher.run(SPEC, prefill)]


# --- the prefill worker's engine ------------------------------------------------------------------


@pytest.mark.usefixtures("hurried")
async def test_prefill_without_progress_is_cancelled_fenced_and_computed_here(
    dispatcher, engine, peer, worker
):
    tokens = await collect(dispatcher, "auto")

    assert [(g.token.token_id, g.prefill) for g in tokens] == [(8, "local")]
    assert engine.inputs[1] == ReceiveFailed("r", EPOCH, None)  # which fences
    assert (peer.closed, peer.released, outcomes(worker)) == (True, ["r"], {"stalled": 1.0})


@pytest.mark.usefixtures("hurried")
async def test_prefill_without_progress_after_the_first_token_keeps_it(
    dispatcher, engine, peer, worker
):
    peer.replies = [Token("r", 7)]
    tokens = await collect(dispatcher, "remote")

    assert [(g.token.token_id, g.prefill) for g in tokens] == [(7, "remote"), (8, None)]
    failed = engine.inputs[1]
    assert isinstance(failed, ReceiveFailed)
    assert failed.first is not None
    assert outcomes(worker) == {"stalled": 1.0}


@pytest.mark.usefixtures("hurried")
async def test_forced_prefill_without_progress_is_a_clear_error(dispatcher, worker):
    with pytest.raises(
        RequestError, match=r"prefill worker failed.*has made no progress for 2\.0 s"
    ) as caught:
        await collect(dispatcher, "remote")

    assert (caught.value.status, caught.value.code, outcomes(worker)) == (
        503,
        "prefill_failed",
        {"stalled": 1.0},
    )


async def test_prefill_worker_that_reports_a_stall_counts_as_stalled(dispatcher, peer, worker):
    peer.replies = [STALLED]
    tokens = await collect(dispatcher, "auto")

    assert [g.prefill for g in tokens] == ["local"]
    assert outcomes(worker) == {"stalled": 1.0}


# --- this worker's engine -------------------------------------------------------------------------


@pytest.mark.parametrize("waits_for", ["a credit", "blocks", "the first token", "the KV"])
async def test_engine_that_stalls_ends_a_remote_prefill_wherever_it_waits(
    dispatcher, engine, peer, worker, waits_for
):
    peer.grants = waits_for != "a credit"
    if waits_for == "blocks":
        engine.answer = lambda m: [ReceiveRefused("r", 9)] if isinstance(m, Receive) else []
    if waits_for == "the KV":
        peer.replies = [Token("r", 7)]
    requested = asyncio.create_task(collect(dispatcher, "remote"))
    for _ in range(20):
        await asyncio.sleep(0)
    client_of(worker).stall("it has stalled")

    with pytest.raises(EngineStalledError):
        await requested
    assert worker.credit_queue.num_requests == 0
    assert outcomes(worker) == (
        {"cancelled": 1.0} if waits_for in ("the first token", "the KV") else {}
    )
    await asyncio.sleep(0)
    assert engine.inputs[-1:] == [Abort("r")]  # what it holds is given back once it recovers


def make_ingress(worker: WorkerContext, *peers: DecodePeer) -> Ingress:
    return Ingress(worker, dispatcher_of(worker), lambda: list(peers))


async def request_credits(ingress: Ingress) -> list[int]:
    return [generated.token.token_id async for generated in ingress.generate([SPEC], "auto")]


async def test_ingress_of_a_stalled_engine_relays_what_comes(worker, engine):
    client_of(worker).stall("it has stalled")
    peer = DecodePeer(Generated(Token("r", 5, finish_reason="stop"), "local"))

    assert await request_credits(make_ingress(worker, peer)) == [5]
    assert not engine.inputs


async def test_ingress_request_without_a_token_goes_to_a_peer_when_the_engine_stalls(worker):
    peer = DecodePeer(Generated(Token("r", 5, finish_reason="stop"), "local"))
    requested = asyncio.create_task(request_credits(make_ingress(worker, peer)))
    while not client_of(worker)._requests:
        await asyncio.sleep(0)
    client_of(worker).stall("it has stalled")

    assert await requested == [5]


async def begun(worker: WorkerContext, engine: ScriptedEngine, *peers: DecodePeer) -> list[int]:
    engine.answer = lambda m: [Tokens([Token("r", 7)])] if isinstance(m, Submit) else []
    made: list[int] = []
    async with aclosing(make_ingress(worker, *peers).generate([SPEC], "auto")) as tokens:
        async for generated in tokens:
            made.append(generated.token.token_id)
            if len(made) == 1:
                client_of(worker).stall("it has stalled")
    return made


async def test_ingress_request_with_a_token_moves_to_a_peer_when_the_engine_stalls(worker, engine):
    peer = DecodePeer(Generated(Token("r~1", 5, finish_reason="stop"), "local"))

    assert await begun(worker, engine, peer) == [7, 5]
    assert peer.outputs == [[7]]
    assert isinstance(engine.inputs[-1], Submit | Abort)


async def test_ingress_whose_peer_fails_while_the_engine_here_stalls_refuses(worker):
    client_of(worker).stall("it has stalled")
    with pytest.raises(RequestError) as caught:
        await request_credits(make_ingress(worker, DecodePeer(STALLED)))

    assert caught.value.code == "engine_stalled"


# --- a decode peer's engine -----------------------------------------------------------------------


async def test_ingress_peer_that_stalls_after_the_first_token_is_left(worker, engine):
    engine.answer = serve
    ingress = make_ingress(worker, DecodePeer(Generated(Token("r", 5), "local"), STALLED))
    ingress._local._num_decoding = 3

    assert await request_credits(ingress) == [5, 8]
    assert worker.metrics.request_moves.labels("stalled", "moved")._value.get() == 1
