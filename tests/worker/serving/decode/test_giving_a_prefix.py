"""KV of a prefix for a prefill worker that lacks it: what is given, and that a failure costs
nothing but time; the taking side too.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import pytest

from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.engine import (
    Abort,
    EngineInput,
    EngineOutput,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Receive,
    ReceiveDone,
    ReceiveReady,
    ReceiveRefused,
    Tokens,
)
from pdcluster_worker.messages.peers import Hello
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token, TransferTarget
from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.serving import peer_handler
from pdcluster_worker.serving.decode.remote_prefill import push_prefix
from pdcluster_worker.serving.peer_handler import PeerRequestHandler
from pdcluster_worker.serving.worker_context import WorkerContext
from tests.worker.serving.doubles import FACTS, ScriptedEngine

SPEC = RequestSpec("r", list(range(200)), SamplingParams(max_tokens=9, seed=3))
BLOCKS = ReceiveReady("r", b"e" * 16, 128, [1, 2])
TARGET = TransferTarget(b"t" * 16, "engine-2", ["127.0.0.1:1"], 16, [4, 5])
FIRST, DONE = Token("r~prefix", 7), PrefillDone("r~prefix", 64, 0.1, transport="tcp")


class Taker:
    """A prefill worker that has so many blocks of any prompt; error: of its `push`."""

    key = "p"

    def __init__(self, num_blocks: int = 0, error: PeerError | None = None) -> None:
        self.num_blocks, self.error = num_blocks, error
        self.given: list[tuple[RequestSpec, tuple[Token, PrefillDone]]] = []

    def prefix_match(self, hashes: Sequence[bytes]) -> int:
        return self.num_blocks

    async def push(
        self,
        spec: RequestSpec,
        write: Callable[[TransferTarget], Awaitable[tuple[Token, PrefillDone]]],
    ) -> bool:
        if self.error is not None:
            raise self.error
        self.given.append((spec, await write(TARGET)))
        return True


def receive_prefix(
    worker: WorkerContext,
    spec: RequestSpec,
    given: Callable[[], Awaitable[tuple[Token, PrefillDone]]],
) -> AsyncGenerator[TransferTarget, None]:
    hello = Hello("e", "prefill", FACTS.geometry, "w", "r1")
    handler = PeerRequestHandler(worker, hello, CreditLedger(1), None)
    return handler.receive_prefix(spec, given)


async def push(worker: WorkerContext, taker: Taker, spec: RequestSpec = SPEC) -> dict[str, float]:
    """Give it; returns the counts by outcome."""
    place = worker.engines.open("r", list)
    await push_prefix(worker, place, taker, spec, BLOCKS)
    place.close()
    value = worker.metrics.registry.get_sample_value
    name = "pdcluster_kv_prefixes_given_total"
    counts = {each: value(name, {"outcome": each}) for each in ("ok", "refused", "failed")}
    return {outcome: count for outcome, count in counts.items() if count}


async def test_the_cached_part_of_the_prompt_is_written_by_the_own_engine(worker, engine):
    engine.answer = lambda it: [Tokens([FIRST]), DONE] if isinstance(it, Prefill) else []
    taker = Taker()
    assert await push(worker, taker) == {"ok": 1}
    ((prefix, written),) = taker.given
    assert (prefix.prompt, prefix.request_id, written) == (
        SPEC.prompt[:128],
        "r~prefix",
        (FIRST, DONE),
    )
    assert Prefill(prefix, TARGET) in engine.inputs


@pytest.mark.parametrize("num_blocks", [17, 32])
async def test_a_little_is_not_given(worker, num_blocks):
    assert await push(worker, Taker(num_blocks)) == {}


async def test_what_is_computed_sooner_than_moved_is_not_given(worker):
    worker.pair_rates.add("p", num_tokens=1, seconds=1.0)
    worker.prefill_rates.add("p", num_tokens=1000, seconds=1.0)
    assert await push(worker, Taker()) == {}


async def test_a_failure_of_either_side_is_counted_and_no_error(worker, engine):
    assert await push(worker, Taker(error=PeerError("gone"))) == {"failed": 1}
    failed = PrefillFailed("r~prefix", "reset")
    engine.answer = lambda it: [Tokens([FIRST]), failed] if isinstance(it, Prefill) else []
    assert await push(worker, Taker()) == {"failed": 2}


async def take(worker: WorkerContext, spec: RequestSpec = SPEC) -> list[TransferTarget]:
    async def given() -> tuple[Token, PrefillDone]:
        return FIRST, DONE

    return [target async for target in receive_prefix(worker, spec, given)]


async def test_a_prefix_is_received_and_one_token_made_after_it(worker, engine):
    def answer(message: EngineInput) -> Sequence[EngineOutput]:
        match message:
            case Receive():
                return [ReceiveReady("r", b"t" * 16, 16, [4, 5])]
            case ReceiveDone():
                return [Tokens([Token("r", 8, finish_reason="length")])]
        return []

    engine.answer = answer
    (target,) = await take(worker)
    assert (target.epoch, target.cached_tokens, target.block_ids) == (b"t" * 16, 16, [4, 5])
    assert target.addresses == ["127.0.0.1:9100"]
    assert ReceiveDone("r", b"t" * 16, FIRST, None) in engine.inputs
    assert worker.metrics.registry.get_sample_value("pdcluster_kv_prefixes_taken_total") == 1


async def test_without_room_nothing_is_taken(worker, engine):
    engine.answer = lambda it: [ReceiveRefused("r", 9)] if isinstance(it, Receive) else []
    assert await take(worker) == []


async def test_a_giver_that_breaks_off_leaves_no_request(worker, engine):
    engine.answer = lambda it: [BLOCKS] if isinstance(it, Receive) else []

    async def given() -> tuple[Token, PrefillDone]:
        raise PeerError("broken off")

    with pytest.raises(PeerError):
        async for _ in receive_prefix(worker, SPEC, given):
            pass
    await wait_aborted(engine)


async def test_a_giver_that_hangs_is_not_waited_for(worker, engine, monkeypatch):
    engine.answer = lambda it: [BLOCKS] if isinstance(it, Receive) else []
    monkeypatch.setattr(peer_handler, "PUSH_SECONDS", 0.05)

    async def given() -> tuple[Token, PrefillDone]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(RequestError, match=r"has not written the prefix within 0\.05 s"):
        async for _ in receive_prefix(worker, SPEC, given):
            pass
    await wait_aborted(engine)


async def test_a_giver_that_times_out_itself_is_not_called_late(worker, engine):
    engine.answer = lambda it: [BLOCKS] if isinstance(it, Receive) else []

    async def given() -> tuple[Token, PrefillDone]:
        raise TimeoutError("no write for 5 s")

    with pytest.raises(RequestError, match="the giver timed out: no write for 5 s"):
        async for _ in receive_prefix(worker, SPEC, given):
            pass
    await wait_aborted(engine)


async def wait_aborted(engine: ScriptedEngine) -> None:
    """Wait until the engine has the blocks back."""
    async with asyncio.timeout(20):
        while engine.inputs[-1] != Abort("r"):
            await asyncio.sleep(0)
