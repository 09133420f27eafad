"""Prompts that begin like one whose KV is on its way from a prefill worker wait for it, and no
others do; whatever becomes of that one, they go on.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest
from msgspec.structs import replace

from pdcluster_schema.policy import OffloadPolicy, PolicyConfig
from pdcluster_schema.qos import HighPrioritySpec
from pdcluster_worker.errors import PeerError
from pdcluster_worker.messages.block_hash import block_hashes
from pdcluster_worker.messages.engine import (
    BlockEvents,
    EngineInput,
    EngineOutput,
    PrefillDone,
    Receive,
    ReceiveDone,
    ReceiveFailed,
    ReceiveReady,
    Submit,
    Tokens,
)
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token, TransferTarget
from pdcluster_worker.serving.decode import offload_decider
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.tracing.request_trace import begin_trace
from tests.worker.serving.doubles import RecordingPeer, ScriptedEngine, dispatcher_of, until

SHARED = list(range(16))  # four blocks
OFFLOAD = OffloadPolicy(prefill_length_threshold=8, min_offload_length=4)


def spec(name: str, own: int, **fields: int) -> RequestSpec:
    sampling = SamplingParams(max_tokens=fields.pop("max_tokens", 3), seed=1)
    return RequestSpec(name, [*SHARED, own, own, own], sampling, **fields)


class SlowPeer(RecordingPeer):
    """Grants every want, and answers a prefill when the test lets it."""

    def __init__(self, key: str) -> None:
        super().__init__(key, grants=True)
        self.computed: dict[str, asyncio.Future[None]] = {}

    async def prefill(
        self, spec: RequestSpec, target: TransferTarget
    ) -> AsyncGenerator[Token | PrefillDone, None]:
        self.computed[spec.request_id] = asyncio.get_running_loop().create_future()
        await self.computed[spec.request_id]
        yield Token(spec.request_id, 7)
        yield PrefillDone(spec.request_id, num_bytes=64, seconds=0.01)


class Serving:
    """An engine with room: a request has one more token after its prefill, and with it comes what
    is cached now.
    """

    def __init__(self) -> None:
        self._specs: dict[str, RequestSpec] = {}
        self._num_events = 0

    def __call__(self, message: EngineInput) -> Sequence[EngineOutput]:
        match message:
            case Receive(spec=spec):
                self._specs[spec.request_id] = spec
                return [ReceiveReady(spec.request_id, b"e" * 16, 0, [5, 6])]
            case Submit(spec=spec):
                self._specs[spec.request_id] = spec
                return self._first(spec.request_id)
            case ReceiveDone(request_id=request_id):
                return self._last(request_id)
            case ReceiveFailed(request_id=request_id):
                return self._first(request_id)
        return []

    def _first(self, request_id: str) -> list[EngineOutput]:
        return [Tokens([Token(request_id, 7)]), *self._last(request_id)]

    def _last(self, request_id: str) -> list[EngineOutput]:
        spec = self._specs[request_id]
        self._num_events += 1
        stored = BlockEvents(block_hashes(spec.prompt, 4, spec.cache_salt), [], self._num_events)
        return [Tokens([Token(request_id, 8, finish_reason="length")]), stored]


@pytest.fixture
def peer() -> SlowPeer:
    return SlowPeer("p")


@pytest.fixture
def dispatcher(worker: WorkerContext, engine: ScriptedEngine, peer: SlowPeer) -> DecodeDispatcher:
    engine.answer = Serving()
    worker.policy = PolicyConfig(offload=OFFLOAD)
    return dispatcher_of(worker, [peer])


class Asked:
    """A request that runs in the background."""

    def __init__(
        self, dispatcher: DecodeDispatcher, spec: RequestSpec, prefill: PrefillMode = "auto"
    ) -> None:
        self.made: list[Generated] = []
        self.task = asyncio.create_task(self._run(dispatcher, spec, prefill))

    @property
    def prefill(self) -> str | None:
        return self.made[0].prefill if self.made else None

    async def _run(
        self, dispatcher: DecodeDispatcher, spec: RequestSpec, prefill: PrefillMode
    ) -> None:
        with begin_trace(spec.request_id) as self.trace:
            async for generated in dispatcher.run(spec, prefill):
                self.made.append(generated)

    async def end(self) -> str | None:
        """Wait for its end: the place of its prefill."""
        async with asyncio.timeout(20):
            await self.task
        return self.prefill


async def settle() -> None:
    """Let everything that can go on go on."""
    for _ in range(200):
        await asyncio.sleep(0)


async def check_sent_at_once(requested: Asked, peer: SlowPeer) -> None:
    """The prompt `f` goes to the prefill worker without a wait."""
    await settle()
    assert "f" in peer.computed
    peer.computed["f"].set_result(None)
    assert await requested.end() == "remote"


async def led(
    dispatcher: DecodeDispatcher, peer: SlowPeer, of: RequestSpec | None = None, **fields: int
) -> Asked:
    leader = Asked(dispatcher, of or spec("leader", 90, **fields))
    await until(lambda: "leader" in peer.computed)
    return leader


async def test_prompts_that_share_a_prefix_wait_for_its_kv_and_are_completed_here(
    dispatcher, engine, peer
):
    leader = await led(dispatcher, peer)
    followers = [Asked(dispatcher, spec(f"f{own}", own)) for own in (91, 92)]
    await settle()
    assert [type(message) for message in engine.inputs] == [Receive]

    serving = engine.answer
    engine.answer = lambda message: () if isinstance(message, ReceiveDone) else serving(message)
    peer.computed["leader"].set_result(None)
    await until(lambda: isinstance(engine.inputs[-1], ReceiveDone))
    await settle()
    assert (len(engine.inputs), leader.prefill) == (2, "remote")  # its KV may not be usable yet

    engine.say(Tokens([Token("leader", 8)]))
    assert [await follower.end() for follower in followers] == ["local", "local"]
    assert list(peer.computed) == ["leader"]
    (waited,) = [event.facts for event in followers[0].trace.events if event.name == "prefix"]
    assert (waited["request"], float(waited["waited_seconds"] or 0) > 0) == ("leader", True)
    queued = followers[0].made[0].token.queue_seconds
    assert queued is not None
    assert queued >= float(waited["waited_seconds"] or 0)

    engine.say(Tokens([Token("leader", 8, finish_reason="length")]))
    await leader.end()
    assert len(dispatcher._decider.prefixes._prefixes) == 0
    assert not dispatcher._decider.prefixes._settled


async def test_prefix_that_the_engine_computes_counts_as_cached(dispatcher, engine, peer):
    """The engine says nothing of its blocks before it has computed them."""
    serving = engine.answer
    engine.answer = lambda message: serving(message) if isinstance(message, Receive) else ()
    local = [Asked(dispatcher, spec("r", 90), "auto")]
    await until(lambda: "r" in peer.computed)
    peer.computed["r"].set_exception(PeerError("gone"))
    await until(lambda: isinstance(engine.inputs[-1], ReceiveFailed))
    local.append(Asked(dispatcher, spec("f", 91)))
    await until(lambda: isinstance(engine.inputs[-1], Submit))
    assert list(peer.computed) == ["r"]

    for requested in local:
        requested.task.cancel()
    await asyncio.gather(*(requested.task for requested in local), return_exceptions=True)
    engine.answer = serving
    other = Asked(dispatcher, spec("g", 92))  # both are gone
    await until(lambda: "g" in peer.computed)
    peer.computed["g"].set_result(None)
    assert await other.end() == "remote"


async def test_where_it_fails_one_of_those_that_wait_goes_and_the_others_wait_for_that_one(
    dispatcher, engine, peer
):
    leader = await led(dispatcher, peer)
    followers = [Asked(dispatcher, spec(f"f{own}", own)) for own in (91, 92, 93)]
    await settle()
    leader.task.cancel()
    await until(lambda: "f91" in peer.computed)
    await settle()
    assert list(peer.computed) == ["leader", "f91"]

    peer.computed["f91"].set_result(None)
    assert [await follower.end() for follower in followers] == ["remote", "local", "local"]


async def test_prompts_of_whole_blocks_do_not_go_one_after_another(dispatcher, peer):
    """One token is always left to compute, so such a prompt would be sent then too."""
    dispatcher._worker.policy = PolicyConfig(offload=OffloadPolicy(prefill_length_threshold=1))
    whole = replace(spec("leader", 90), prompt=list(range(32)))
    Asked(dispatcher, whole)
    followers = [Asked(dispatcher, replace(whole, request_id=name)) for name in ("f", "g")]
    await until(lambda: len(peer.computed) == 3)
    for computed in peer.computed.values():
        computed.set_result(None)
    assert [await follower.end() for follower in followers] == ["remote", "remote"]


async def test_prompt_waits_for_half_of_the_time_that_it_has(dispatcher, peer):
    await led(dispatcher, peer)
    sent = Asked(dispatcher, replace(spec("f", 91), ttft_slo_seconds=0.1))
    await settle()
    assert "f" not in peer.computed

    await until(lambda: "f" in peer.computed)
    peer.computed["f"].set_result(None)
    assert await sent.end() == "remote"
    (waited,) = [event.facts for event in sent.trace.events if event.name == "prefix"]
    assert 0.05 <= float(waited["waited_seconds"] or 0) < 5.0
    assert (sent.made[0].token.queue_seconds or 0.0) >= 0.05


async def test_prompt_that_waits_looks_at_what_has_changed(dispatcher, peer, monkeypatch):
    monkeypatch.setattr(offload_decider, "POLL_SECONDS", 0.01)
    await led(dispatcher, peer)
    follower = Asked(dispatcher, spec("f", 91))
    await settle()
    assert dispatcher._worker.num_waiting_for_prefix == 1
    dispatcher._worker.policy = PolicyConfig(offload=OffloadPolicy(prefill_length_threshold=999))

    assert await follower.end() == "local"
    assert dispatcher._worker.num_waiting_for_prefix == 0


async def test_client_that_leaves_while_its_prompt_waits_leaves_nothing(dispatcher, engine, peer):
    leader = await led(dispatcher, peer)
    follower = Asked(dispatcher, spec("f", 91))
    await settle()
    follower.task.cancel()
    await asyncio.gather(follower.task, return_exceptions=True)
    peer.computed["leader"].set_result(None)

    assert await leader.end() == "remote"
    assert dispatcher.num_requests == 0
    assert len(dispatcher._decider.prefixes._prefixes) == 0


async def test_times_of_a_prompt_that_waited_count_from_its_arrival(dispatcher, engine, peer):
    await led(dispatcher, peer)
    follower = Asked(dispatcher, replace(spec("f", 91), deadline_seconds=1000.0))
    await settle()
    await asyncio.sleep(0.01)
    peer.computed["leader"].set_result(None)
    await follower.end()

    (submit,) = [message for message in engine.inputs if isinstance(message, Submit)]
    assert submit.spec.deadline_seconds is not None
    assert submit.spec.deadline_seconds < 1000.0


@pytest.mark.parametrize(
    ("follower", "prefill"),
    [
        (spec("f", 91), "remote"),  # its client wants it
        (replace(spec("f", 91), prompt=list(range(50, 69))), "auto"),  # nothing is shared
        (replace(spec("f", 91), prompt=[*SHARED, *range(50, 59)]), "auto"),  # and long by itself
        (replace(spec("f", 91), cache_salt=b"another tenant"), "auto"),
        (replace(spec("f", 91), priority=-1), "auto"),  # more urgent than the one on its way
    ],
)
async def test_prompt_that_gains_nothing_or_may_not_wait_is_sent(
    dispatcher, peer, follower, prefill
):
    await led(dispatcher, peer)
    await check_sent_at_once(Asked(dispatcher, follower, prefill), peer)


async def test_prompt_of_high_priority_that_is_offloaded_at_once_does_not_wait(dispatcher, peer):
    high = HighPrioritySpec(offload_at_once=True)
    dispatcher._worker.policy = PolicyConfig(offload=OFFLOAD, high_priority=high)
    await led(dispatcher, peer, priority=-10)
    await check_sent_at_once(Asked(dispatcher, spec("f", 91, priority=-10)), peer)


async def test_prompt_that_stays_anyway_does_not_wait(dispatcher, peer):
    await led(dispatcher, peer)
    assert await Asked(dispatcher, spec("f", 91), "local").end() == "local"
    dispatcher._worker.policy = PolicyConfig(offload=OffloadPolicy(prefill_length_threshold=999))
    assert await Asked(dispatcher, spec("g", 92)).end() == "local"


@pytest.mark.parametrize(
    ("leader", "follower"),
    [
        (
            replace(spec("leader", 90), prompt=[*SHARED, *range(50, 74)]),
            replace(spec("f", 91), prompt=[*SHARED[:8], *range(80, 84)]),
        ),
        # it may be far behind in that one's line
        (replace(spec("leader", 90), prefiller="p:8000"), spec("f", 91)),
        (spec("leader", 90, max_tokens=1), spec("f", 91)),
    ],
    ids=["much longer", "names its prefill worker", "of one token, whose KV does not come"],
)
async def test_nothing_waits_for_a_prompt(dispatcher, peer, leader, follower):
    await led(dispatcher, peer, leader)
    await check_sent_at_once(Asked(dispatcher, follower), peer)


async def test_nothing_waits_where_the_engine_keeps_no_prefixes(dispatcher, worker, peer):
    engine = worker.engines.first
    engine.facts = replace(engine.facts, prefix_caching=False)
    await led(dispatcher, peer)
    await check_sent_at_once(Asked(dispatcher, spec("f", 91)), peer)
