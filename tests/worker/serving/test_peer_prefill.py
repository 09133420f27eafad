"""The prefill worker's side of a request: what its engine says becomes the reply to the peer."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import (
    Abort,
    EngineInput,
    EngineOutput,
    Prefill,
    PrefillDone,
    PrefillFailed,
    RequestFailed,
    Tokens,
)
from pdcluster_worker.messages.peers import Hello
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token, TransferTarget
from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.serving.peer_handler import PeerRequestHandler
from pdcluster_worker.serving.worker_context import WorkerContext
from tests.worker.serving.doubles import FACTS, ScriptedEngine

SPEC = RequestSpec("r", [1, 2, 3], SamplingParams(max_tokens=4, seed=1))
TARGET = TransferTarget(b"e" * 16, "decode-engine", ["127.0.0.1:1"], 0, [5])
DONE = PrefillDone("r", num_bytes=64, seconds=0.02, busy_seconds=0.01)


def prefill(worker: WorkerContext) -> AsyncGenerator[Token | PrefillDone, None]:
    hello = Hello("e", "prefill", FACTS.geometry, "w", "r1")
    return PeerRequestHandler(worker, hello, CreditLedger(1), None).prefill("d", SPEC, TARGET)


async def collect(
    worker: WorkerContext, engine: ScriptedEngine, *outputs: EngineOutput
) -> list[Token | PrefillDone]:
    def answer(message: EngineInput) -> Sequence[EngineOutput]:
        return outputs if isinstance(message, Prefill) else ()

    engine.answer = answer
    return [reply async for reply in prefill(worker)]


async def test_prefilling_hands_over_the_token_and_done_even_when_both_are_there_at_once(
    worker, engine
):
    replies = await collect(worker, engine, Tokens([Token("r", 7)]), DONE)

    assert replies == [Token("r", 7), DONE]
    assert engine.inputs == [Prefill(SPEC, TARGET)]
    assert worker.active == 0
    assert worker.sent_bytes_per_second == 6400


async def test_prefill_worker_observes_its_queue_prefill_first_token_and_transfer(worker, engine):
    await collect(
        worker, engine, Tokens([Token("r", 7, queue_seconds=0.5, prefill_seconds=0.25)]), DONE
    )
    value = worker.metrics.registry.get_sample_value
    name = "pdcluster_remote_prefill_phase_seconds"
    phases = ("queue", "prefill", "first_token", "transfer")

    assert [value(f"{name}_count", {"phase": phase}) for phase in phases] == [1, 1, 1, 1]
    assert [
        value(f"{name}_sum", {"phase": phase}) for phase in ("queue", "prefill", "transfer")
    ] == [0.5, 0.25, 0.02]


async def test_prefilling_ends_with_a_token_that_ends_the_request(worker, engine):
    token = Token("r", 2, finish_reason="stop")

    assert await collect(worker, engine, Tokens([token])) == [token]


@pytest.mark.parametrize(
    ("output", "reason", "status"),
    [
        (
            PrefillFailed("r", "connection reset by peer"),
            "KV transfer to 127.0.0.1:1 failed: connection reset",
            503,
        ),
        (RequestFailed("r", "logits are not finite"), "logits are not finite", 500),
    ],
)
async def test_prefilling_failure_of_the_engine_is_reported(worker, engine, output, reason, status):
    with pytest.raises(RequestError, match=reason) as caught:
        await collect(worker, engine, output)

    assert (caught.value.status, worker.active) == (status, 0)


async def test_prefilling_cancelled_by_the_peer_aborts_in_the_engine(worker, engine):
    engine.answer = lambda m: [Tokens([Token("r", 7)])] if isinstance(m, Prefill) else ()
    async with aclosing(prefill(worker)) as replies:
        await anext(replies)
    await asyncio.sleep(0)

    assert engine.inputs[-1] == Abort("r")


async def test_prefilling_draining_worker_keeps_the_credits_that_are_out(worker, engine):
    """The service has checked the credit before it calls; a worker without credits left refuses
    there.
    """
    worker.announce("draining")

    assert await collect(worker, engine, Tokens([Token("r", 7)]), DONE) == [Token("r", 7), DONE]
