"""A verification's faults, with an engine and a prefill worker that are played.

The tokens, bytes and checksums of real workers are in tests/system/test_verification.py.
"""

import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from pdcluster_schema.routing import PrefillScoreSpec
from pdcluster_worker.errors import PeerError
from pdcluster_worker.messages.engine import (
    EngineInput,
    EngineOutput,
    PrefillDone,
    Receive,
    Received,
    ReceiveDone,
    ReceiveReady,
    ReceiveRefused,
    Submit,
    Tokens,
)
from pdcluster_worker.messages.peers import VerificationResult, VerifyCall, WorkerLoad
from pdcluster_worker.messages.requests import Token
from pdcluster_worker.serving.decode import verification
from pdcluster_worker.serving.decode.broker import CreditBroker
from pdcluster_worker.serving.decode.verification import TransferVerification
from pdcluster_worker.serving.worker_context import WorkerContext
from tests.worker.serving.doubles import RecordingPeer, ScriptedEngine

DONE = PrefillDone("r", 4096, 0.5, checksum=7, busy_seconds=0.25)
EPOCH = b"e" * 16


def tokens(request_id: str, *ids: int) -> Tokens:
    """The last of them ends the answer; the second best of each is 9, far behind."""
    return Tokens(
        [
            Token(
                request_id,
                token_id,
                logprob=-0.1,
                top_logprobs=[(token_id, -0.1), (9, -3.0)],
                finish_reason="length" if index == len(ids) - 1 else None,
            )
            for index, token_id in enumerate(ids)
        ]
    )


class PlayedPeer(RecordingPeer):
    """A connected prefill worker of pool `a`."""

    def __init__(self) -> None:
        super().__init__("p-0", grants=True)
        self.record = SimpleNamespace(pool="a", role="prefill")
        self.state = "ready"
        self.replies = [Token("r", 1), DONE]


class Rig:
    """A verification over them.  received: the engine's report; remote, local: its tokens."""

    def __init__(self, worker: WorkerContext, engine: ScriptedEngine) -> None:
        self.worker, self.engine = worker, engine
        self.received: Received | None = Received("r", 8, 2, 4096, is_intact=True)
        self.remote, self.local = (2, 3), (1, 2, 3)
        self.peer, self.other = PlayedPeer(), RecordingPeer("p-1")
        self.peers = [self.peer]
        self.refused: dict[str, str] = {}
        broker = CreditBroker(
            worker.credit_queue, lambda: [self.other, *self.peers], PrefillScoreSpec, 4
        )
        self.peer.broker = broker
        self.verification = TransferVerification(
            "d-0", worker, broker, lambda: self.peers, lambda: self.refused
        )
        engine.answer = self.answer

    def answer(self, message: EngineInput) -> list[EngineOutput]:
        match message:
            case Receive(spec=spec):
                return [ReceiveReady(spec.request_id, EPOCH, 0, [1, 2])]
            case ReceiveDone(request_id=request_id):
                text = [self.received] if self.received else []
                named = [Received(request_id, *_fields(each)) for each in text]
                return [*named, tokens(request_id, *self.remote)]
            case Submit(spec=spec):
                return [tokens(spec.request_id, *self.local)]
        return []

    async def run(self, *, even_if_busy: bool = False) -> VerificationResult:
        return await self.verification.run(VerifyCall("d-0", "a", even_if_busy))


def _fields(received: Received) -> tuple[int, int, int, bool | None, float]:
    arrived = received.num_tokens, received.num_blocks, received.num_bytes
    return *arrived, received.is_intact, received.seconds


@pytest.fixture
def rig(worker: WorkerContext, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(verification, "CONNECT_SECONDS", 0.0)
    return Rig(worker, engine)


async def test_a_vocabulary_that_is_not_known_is_verified_with_ids_that_every_model_has(
    rig, engine, monkeypatch
):
    facts = replace(rig.worker.engine_ready, vocab_size=0)
    monkeypatch.setattr(rig.worker, "_facts", facts)

    found = await rig.run()

    prompts = [each.spec.prompt for each in engine.inputs if isinstance(each, Submit)]
    assert (found.outcome, len(prompts)) == ("verified", 1)
    assert 0 <= min(prompts[0]) <= max(prompts[0]) < 256


async def test_verification_asks_its_one_worker_and_gives_the_credit_back(rig):
    found = await rig.run()

    assert found == VerificationResult(
        "verified",
        "d-0",
        "p-0",
        transport="tcp",
        num_prompt_tokens=64,
        num_tokens=3,
        num_bytes=4096,
        bytes_per_second=16384,
        has_checksum=True,
    )
    assert (len(rig.peer.claims), rig.other.claims) == (1, [])
    assert rig.peer.released == [rig.peer.claims[0][0]]


async def test_transport_is_the_one_that_moved_the_kv(rig):
    rig.peer.replies = [Token("r", 1), PrefillDone("r", 1, 1.0, transport="ucx")]

    assert (await rig.run()).transport == "ucx"


@pytest.mark.parametrize(
    ("received", "fault"),
    [
        (Received("r", 0, 2, 4096, is_intact=False), "damaged"),
        (Received("r", 0, 0, 0), "not_used"),
        (None, "not_used"),
    ],
)
async def test_kv_that_is_damaged_or_not_used_fails(rig, received, fault):
    rig.received = received

    found = await rig.run()

    assert (found.outcome, found.fault) == ("failed", fault)


@pytest.mark.parametrize(
    ("remote", "local", "outcome"),
    [
        ((2, 3), (1, 2, 3), "verified"),
        ((2, 4), (1, 2, 3), "failed"),
        ((2,), (1, 2, 3), "failed"),
        ((9, 3), (1, 2, 3), "failed"),  # second best, and far behind: no near tie
    ],
)
async def test_tokens_are_those_of_a_local_prefill(rig, remote, local, outcome):
    rig.remote, rig.local = remote, local

    found = await rig.run()

    assert (found.outcome, found.fault) == (
        outcome,
        None if outcome == "verified" else "tokens_differ",
    )


@pytest.mark.parametrize(
    ("received", "figures"),
    [
        (Received("r", 8), (4096, 16384)),
        (Received("r", 8, num_bytes=3000, seconds=0.5), (3000, 6000)),
    ],
    ids=["an engine without checksums", "an engine that fetches measures the rate itself"],
)
async def test_a_transfer_without_a_checksum_is_verified(rig, received, figures):
    rig.received = received

    found = await rig.run()

    assert (found.outcome, found.has_checksum) == ("verified", False)
    assert (found.num_bytes, found.bytes_per_second) == figures


@pytest.mark.parametrize("replies", [[PeerError("it is gone")], [Token("r", 1)], [DONE]])
async def test_remote_prefill_that_breaks_off_fails(rig, replies):
    rig.peer.replies = replies

    found = await rig.run()

    assert (found.outcome, found.fault) == ("failed", "transfer_failed")


async def test_prefill_worker_that_drains_meanwhile_postpones_it(rig, monkeypatch):
    monkeypatch.setattr(CreditBroker, "acquire", _no_credit)

    found = await rig.run(even_if_busy=True)

    assert (found.outcome, found.message) == ("postponed", "p-0 takes no new requests")
    assert rig.engine.inputs == []


async def _no_credit(*_: object) -> None:
    return None


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        (Submit, "postponed"),  # the local run: the transfer has ended
        (ReceiveDone, "failed"),
        (Receive, "postponed"),
    ],
    ids=["no local prefill", "no end of the transfer", "no room yet"],
)
async def test_only_a_transfer_that_began_fails_for_want_of_time(
    rig, monkeypatch, message, outcome
):
    monkeypatch.setattr(verification, "RUN_SECONDS", 0.05)
    answer = rig.engine.answer
    rig.engine.answer = lambda sent: [] if isinstance(sent, message) else answer(sent)

    assert (await rig.run(even_if_busy=True)).outcome == outcome


async def test_a_credit_that_does_not_come_in_time_postpones_it(rig, monkeypatch):
    monkeypatch.setattr(verification, "RUN_SECONDS", 0.05)
    rig.peer.broker = None

    found = await rig.run(even_if_busy=True)

    assert (found.outcome, found.message) == ("postponed", "p-0 computed no prompt within 0 s")


async def test_refused_worker_of_the_pool_fails_it(rig):
    rig.refused = {"p-0": "weights differ"}

    found = await rig.run()

    assert (found.fault, found.message) == ("pair_refused", "p-0 is refused: weights differ")
    assert rig.engine.inputs == []


async def test_pool_that_is_not_connected_fails(rig):
    rig.peer.ready, rig.peer.state = False, "lost"

    found = await rig.run()

    assert found.fault == "not_connected"
    assert "p-0 is lost" in found.message


async def test_nothing_is_sent_while_the_prefill_worker_is_busy(rig):
    rig.peer.load = WorkerLoad(num_running=1)

    assert (await rig.run()).outcome == "postponed"
    assert rig.engine.inputs == []
    assert (await rig.run(even_if_busy=True)).outcome == "verified"


async def test_nothing_is_sent_while_this_worker_is_busy(rig):
    with rig.worker.request():
        assert (await rig.run()).outcome == "postponed"
    assert rig.engine.inputs == []


async def test_full_pool_of_blocks_postpones_it(rig):
    rig.engine.answer = lambda message: (
        [ReceiveRefused(message.spec.request_id, 4)] if isinstance(message, Receive) else []
    )

    assert (await rig.run()).outcome == "postponed"


async def test_one_verification_runs_at_a_time(rig):
    first, second = await asyncio.gather(rig.run(), rig.run())

    assert sorted([first.outcome, second.outcome]) == ["postponed", "verified"]
