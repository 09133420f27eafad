"""The remote leg: what the engine, the peer and the client see when it works, when it fails and
when the client leaves.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from pdcluster_schema.policy import OffloadPolicy, PolicyConfig
from pdcluster_schema.qos import AdmissionSpec
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.engine import (
    Abort,
    EngineInput,
    EngineOutput,
    Fetch,
    FetchFailed,
    PrefillDone,
    Receive,
    ReceiveDone,
    ReceiveFailed,
    ReceiveRefused,
    Submit,
    Tokens,
)
from pdcluster_worker.messages.peers import Generated, PrefillMode, WorkerLoad
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.routing.prefill_choice import REQUESTING_HEADS
from pdcluster_worker.routing.ttft import MIN_SAMPLES, STEP, SloFeedback, TtftEstimates
from pdcluster_worker.serving.decode import remote_prefill
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.decode.offload_decider import OffloadDecider, RequestTimer
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.tracing.request_trace import (
    LIFETIME,
    Fact,
    RequestTrace,
    add_event,
    begin_trace,
)
from tests.worker.fake_clock import FakeClock
from tests.worker.serving.doubles import (
    EPOCH,
    FACTS,
    RecordingPeer,
    ScriptedEngine,
    client_of,
    compute,
    dispatcher_of,
    outcomes,
    stats,
    until,
)

SPEC = RequestSpec("r", list(range(10)), SamplingParams(max_tokens=3, seed=1))
FIRST = Token("r", 7)
DONE = PrefillDone("r", num_bytes=64, seconds=0.01)
KEPT = PrefillDone("r", num_bytes=0, seconds=0.0, handle=b"kv")


@pytest.fixture
def peer() -> RecordingPeer:
    return RecordingPeer("p", grants=True)


@pytest.fixture
def peers(peer: RecordingPeer) -> list[RecordingPeer]:
    return [peer]


@pytest.fixture
def dispatcher(
    worker: WorkerContext, engine: ScriptedEngine, peers: list[RecordingPeer]
) -> DecodeDispatcher:
    engine.answer = compute
    return dispatcher_of(worker, peers)


async def collect(dispatcher: DecodeDispatcher, prefill: PrefillMode = "remote") -> list[Generated]:
    return [generated async for generated in dispatcher.run(SPEC, prefill)]


async def test_remote_prefill_streams_the_peers_token_then_the_engines(
    dispatcher, engine, peer, worker
):
    peer.replies = [FIRST, DONE]
    tokens = await collect(dispatcher)

    assert [(g.token.token_id, g.prefill) for g in tokens] == [(7, "remote"), (8, None)]
    assert (peer.targets[0].epoch, peer.targets[0].block_ids, peer.targets[0].cached_tokens) == (
        EPOCH,
        [5, 6],
        4,
    )
    assert [type(m) for m in engine.inputs] == [Receive, ReceiveDone]
    assert (outcomes(worker), worker.credit_queue.num_requests, peer.released) == (
        {"ok": 1.0},
        0,
        [],
    )


@pytest.mark.parametrize("mode", ["remote", "local"])
async def test_request_notes_its_lifetime_in_order(dispatcher, peer, mode):
    peer.replies = [FIRST, DONE]
    with begin_trace("r") as trace:
        add_event("issued")
        await collect(dispatcher, mode)

    migration = ("migration_begin", "migration_end")
    events = [event for event in trace.events if event.name in LIFETIME]
    assert [event.name for event in events] == [
        name for name in LIFETIME if mode == "remote" or name not in migration
    ]
    assert [event.seconds for event in events] == sorted(event.seconds for event in events)  # [D1]
    others = {event.name: event.facts for event in trace.events if event.name not in LIFETIME}
    assert [name for name in others if name in ("credit", "first_step")] == (
        ["credit", "first_step"] if mode == "remote" else []
    )
    assert mode == "local" or others["credit"]["peer"] == "p"


async def test_remote_prefill_failure_before_the_first_token_falls_back_to_local(
    dispatcher, engine, peer, worker
):
    worker.policy = PolicyConfig(offload=OffloadPolicy(prefill_length_threshold=0))
    peer.replies = [PeerError("gone")]
    with begin_trace("r") as trace:
        tokens = await collect(dispatcher, "auto")

    assert [(g.token.token_id, g.prefill) for g in tokens] == [(7, "local"), (8, None)]
    assert engine.inputs[1] == ReceiveFailed("r", EPOCH, None)
    assert (outcomes(worker), peer.released) == ({"failed": 1.0}, ["r"])
    facts = {event.name: event.facts for event in trace.events}
    assert facts["prefill_failed"] == {"peer": "p", "outcome": "failed"}
    assert facts["context_end"]["prefill"] == "local"
    # its time counts there: else `sloFeedback` would take it for slowness here, and send more
    lines = dispatcher._decider._feedback._fits
    assert {side: queue.num_samples for side, queue in lines.items()} == {"local": 0, "remote": 1}


@pytest.mark.parametrize("replies", [[FIRST, PeerError("gone")], [FIRST]], ids=["error", "end"])
async def test_remote_prefill_failure_after_the_first_token_keeps_it(
    dispatcher, engine, peer, worker, replies
):
    peer.replies = replies
    tokens = await collect(dispatcher)

    assert [(g.token.token_id, g.prefill) for g in tokens] == [(7, "remote"), (8, None)]
    failed = engine.inputs[1]
    assert isinstance(failed, ReceiveFailed)
    assert failed.first is not None
    assert (failed.first.token_id, outcomes(worker)) == (7, {"failed": 1.0})


async def test_remote_prefill_forced_fails_clean_when_the_peer_fails_first(
    dispatcher, engine, peer
):
    peer.replies = [PeerError("gone")]
    with pytest.raises(RequestError, match="the prefill worker failed") as caught:
        await collect(dispatcher)

    assert caught.value.status == 503
    engine.say()
    await asyncio.sleep(0)
    assert engine.inputs[-1] == Abort("r")


class FetchingEngine:
    """A stock engine of which some fetches fail.  on_fail: called with each of them."""

    def __init__(self, num_failures: int, on_fail: Callable[[], None] = lambda: None) -> None:
        self._num_failures = num_failures
        self._on_fail = on_fail

    def __call__(self, message: EngineInput) -> Sequence[EngineOutput]:
        if not isinstance(message, Fetch):
            return compute(message)
        self._num_failures -= 1
        if self._num_failures >= 0:
            self._on_fail()
            return [FetchFailed("r", "no handshake")]
        return [Tokens([Token("r", 7)]), Tokens([Token("r", 8, finish_reason="length")])]


async def test_kv_whose_fetch_fails_once_is_fetched_again(dispatcher, engine, peer, worker):
    peer.replies = [KEPT]
    engine.answer = FetchingEngine(1)
    with begin_trace("r") as trace:
        tokens = await collect(dispatcher)

    assert [(g.token.token_id, g.prefill) for g in tokens] == [(7, "remote"), (8, None)]
    assert engine.inputs[1:] == [Fetch("r", EPOCH, b"kv")] * 2
    assert outcomes(worker) == {"ok": 1.0}
    assert "fetches_again" in {event.name for event in trace.events}


async def test_kv_whose_fetch_fails_twice_is_computed_here(dispatcher, engine, peer, worker):
    worker.policy = PolicyConfig(offload=OffloadPolicy(prefill_length_threshold=0))
    peer.replies = [KEPT]
    engine.answer = FetchingEngine(2)
    tokens = await collect(dispatcher, "auto")

    assert [(g.token.token_id, g.prefill) for g in tokens] == [(7, "local"), (8, None)]
    assert [type(m) for m in engine.inputs[1:]] == [Fetch, Fetch, ReceiveFailed]
    assert outcomes(worker) == {"failed": 1.0}


RANKS = replace(FACTS.device, tensor_parallel_size=2)


@pytest.mark.parametrize(
    "reason", ["its worker is lost", "it is old", "two ranks wrote it", "two ranks read it", "?"]
)
async def test_kv_that_may_be_gone_is_not_fetched_again(
    dispatcher, engine, peer, worker, monkeypatch, reason
):
    def change() -> None:
        if reason == "it is old":
            monkeypatch.setattr(remote_prefill, "REFETCH_SECONDS", 0.0)
        elif reason == "two ranks read it":
            own = worker.engines.first
            own.facts = replace(own.facts, device=RANKS)
        elif reason == "its worker is lost":
            peer.state = "lost"
        else:
            peer.record.device = RANKS if reason == "two ranks wrote it" else None

    worker.policy = PolicyConfig(offload=OffloadPolicy(prefill_length_threshold=0))
    peer.replies = [KEPT]
    engine.answer = FetchingEngine(1, change)
    tokens = await collect(dispatcher, "auto")

    assert [(g.token.token_id, g.prefill) for g in tokens] == [(7, "local"), (8, None)]
    assert [type(m) for m in engine.inputs[1:]] == [Fetch, ReceiveFailed]


async def test_remote_prefill_forced_without_a_prefill_worker_is_a_503(dispatcher, peers, worker):
    peers.clear()
    with pytest.raises(RequestError, match="no prefill worker is ready") as caught:
        await collect(dispatcher)

    assert caught.value.status == 503
    assert worker.credit_queue.num_requests == 0


async def test_remote_prefill_first_token_that_ends_the_request_moves_nothing(
    dispatcher, engine, peer, worker
):
    peer.replies = [Token("r", 2, finish_reason="stop")]
    tokens = await collect(dispatcher)
    await asyncio.sleep(0)

    assert [(g.token.token_id, g.token.finish_reason) for g in tokens] == [(2, "stop")]
    assert engine.inputs[-1] == Abort("r")  # gives the reserved blocks back
    assert outcomes(worker) == {"ok": 1.0}


async def test_remote_prefill_out_of_blocks_returns_the_credit_and_waits_for_room(
    dispatcher, engine, peer, worker
):
    answers = iter([[ReceiveRefused("r", needed_blocks=3)], compute(Receive(SPEC))])
    engine.answer = lambda m: next(answers) if isinstance(m, Receive) else compute(m)
    peer.replies = [FIRST, DONE]
    task = asyncio.create_task(collect(dispatcher))
    while not peer.released:
        await asyncio.sleep(0)
    assert worker.credit_queue.num_requests == 1  # it waits in the queue, visibly, without a credit
    engine.say(stats(free_blocks=2))
    await asyncio.sleep(0)
    assert not task.done()
    # for this worker, not for prefill
    assert (worker.load().num_waiting, worker.load().credit_queue_requests) == (1, 0)
    engine.say(stats(free_blocks=3))

    assert [g.token.token_id for g in await task] == [7, 8]
    assert len(peer.claims) == 2


async def test_remote_prefill_client_gone_ends_both_legs(dispatcher, engine, peer, worker):
    peer.replies = [FIRST, DONE]
    async with aclosing(dispatcher.run(SPEC, "remote")) as tokens:
        await anext(tokens)
    await asyncio.sleep(0)

    assert peer.closed
    assert engine.inputs[-1] == Abort("r")
    assert (outcomes(worker), dispatcher.num_requests) == ({"cancelled": 1.0}, 0)


async def test_client_gone_while_a_prefix_is_given_gives_the_credit_back(
    dispatcher, peer, worker, monkeypatch
):
    giving = asyncio.Event()

    async def push(*_: object) -> None:
        giving.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(remote_prefill, "push_prefix", push)
    task = asyncio.create_task(collect(dispatcher))
    async with asyncio.timeout(20):
        await giving.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert peer.released == ["r"]
    assert outcomes(worker) == {"cancelled": 1.0}


async def test_decoding_auto_prefills_short_prompts_locally(dispatcher, engine, peer):
    tokens = await collect(dispatcher, "auto")

    assert tokens[0].prefill == "local"
    assert engine.inputs == [Submit(SPEC)]
    assert not peer.claims


@pytest.mark.parametrize(
    ("address", "prefill", "place"),
    [
        ("p:8000", "auto", "remote"),
        ("p:8000", "remote", "remote"),
        ("p:8000", "local", "local"),
        # not of this cluster: the policy decides
        ("elsewhere:8000", "auto", "local"),
    ],
)
async def test_prefill_worker_that_a_request_names_prefills_it_whatever_its_length(
    dispatcher, peer, peers, address, prefill, place
):
    other = RecordingPeer("other")
    peers.insert(0, other)
    peer.replies = [FIRST, DONE]
    spec = replace(SPEC, prefiller=address)
    tokens = [generated async for generated in dispatcher.run(spec, prefill)]

    assert tokens[0].prefill == place
    assert bool(peer.targets) is (place == "remote")
    assert not other.claims


async def test_requests_that_name_a_busy_prefill_worker_hold_up_no_others(
    dispatcher, peer, peers, worker
):
    busy = RecordingPeer("busy")  # it grants nothing
    peers.append(busy)
    peer.replies = [FIRST, DONE]

    async def run_named(index: int) -> None:
        spec = replace(SPEC, request_id=f"named-{index}", prefiller="busy:8000")
        async for _ in dispatcher.run(spec, "auto"):
            pass

    named = [asyncio.create_task(run_named(index)) for index in range(REQUESTING_HEADS + 1)]
    await until(lambda: worker.credit_queue.num_requests > REQUESTING_HEADS)
    await asyncio.sleep(0)
    asking = [request_id for request_id, _ in busy.claims]
    async with asyncio.timeout(5):
        tokens = await collect(dispatcher)

    assert tokens[0].prefill == "remote"
    assert asking == [f"named-{index}" for index in range(REQUESTING_HEADS)]
    for task in named:
        task.cancel()
    await asyncio.gather(*named, return_exceptions=True)
    assert worker.credit_queue.num_requests == 0


def prompt_of(num_tokens: int) -> RequestSpec:
    return RequestSpec("other", [1] * num_tokens, SamplingParams(max_tokens=1, seed=1))


@pytest.mark.parametrize(
    ("bound", "fits", "refused", "message"),
    [
        ({"max_queued_requests": 1}, None, 10, "maxQueuedRequests is 1"),
        (
            {"max_queued_tokens": 25},
            15,
            16,
            r"10 prompt tokens wait here, and 16 more are over .*maxQueuedTokens \(25\)",
        ),
    ],
    ids=["requests", "tokens"],
)
async def test_decoding_refuses_beyond_the_bounds_of_the_queue(
    dispatcher, engine, worker, bound, fits, refused, message
):
    """[V8]: before the engine gets it, and until those that wait have their first token."""
    engine.answer = lambda _: ()
    worker.policy = PolicyConfig(admission=AdmissionSpec(**bound))
    dispatcher.admit([prompt_of(1000)])  # nothing waits
    waiting = asyncio.create_task(collect(dispatcher, "local"))
    await until(lambda: engine.inputs)
    if fits is not None:
        dispatcher.admit([prompt_of(fits)])
    with pytest.raises(RequestError, match=message) as caught:
        dispatcher.admit([prompt_of(refused)])
    error = caught.value
    assert (error.status, error.code, error.retry_after_seconds) == (503, "queue_full", 1)
    assert len(engine.inputs) == 1

    engine.say(Tokens([Token("r", 7)]))
    await until(lambda: not dispatcher._admission.num_waiting)
    dispatcher.admit([prompt_of(1000)])
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (dispatcher.num_requests, dispatcher._admission.waiting_tokens) == (0, 0)


def long_prompts(worker: WorkerContext) -> tuple[int, int]:
    value = worker.metrics.registry.get_sample_value
    remote, local = (
        value("pdcluster_long_prompts_total", {"prefill": place}) for place in ("remote", "local")
    )
    assert (remote, local) == (
        worker.share.num_remote,
        worker.share.num_long - worker.share.num_remote,
    )
    return worker.share.num_long, worker.share.num_remote


@pytest.mark.parametrize(
    ("threshold", "replies", "prefill", "expected"),
    [
        (0, [FIRST, DONE], "auto", (1, 1)),
        (0, [PeerError("gone")], "auto", (1, 0)),
        (0, [FIRST, PeerError("gone")], "auto", (1, 0)),
        # the client's own choice says nothing about the cluster
        (0, [FIRST, DONE], "local", (0, 0)),
        (11, [FIRST, DONE], "auto", (0, 0)),  # a short prompt: nothing to offload
        (11, [FIRST, DONE], "remote", (1, 1)),
    ],
)
async def test_long_prompts_are_counted_by_where_they_were_prefilled(
    dispatcher, peer, worker, threshold, replies, prefill, expected
):
    worker.policy = PolicyConfig(offload=OffloadPolicy(prefill_length_threshold=threshold))
    peer.replies = replies
    await collect(dispatcher, prefill)

    assert long_prompts(worker) == expected


@pytest.mark.parametrize(("role", "expected"), [("decode", (1, 0)), ("mixed", (0, 0))])
async def test_a_long_prompt_without_a_prefill_worker_is_counted_as_local(
    dispatcher, peers, worker, role, expected
):
    peers.clear()
    worker.role = role
    worker.policy = PolicyConfig(offload=OffloadPolicy(prefill_length_threshold=10))
    await collect(dispatcher, "auto")

    assert long_prompts(worker) == expected


async def test_a_mixed_worker_decides_nothing(dispatcher, worker):
    worker.role = "mixed"
    worker.policy = PolicyConfig(offload=OffloadPolicy(prefill_length_threshold=1))
    with begin_trace("r") as trace:
        tokens = await collect(dispatcher, "auto")

    assert tokens[0].prefill == "local"
    assert [event.name for event in trace.events if event.name not in LIFETIME] == []


async def reported(worker: WorkerContext, engine: ScriptedEngine) -> None:
    """The engine has reported that a quarter of its blocks is in use."""
    engine.say(stats(free_blocks=48))
    while client_of(worker).stats is None:
        await asyncio.sleep(0)


def offload_event(trace: RequestTrace) -> dict[str, Fact]:
    (event,) = [event for event in trace.events if event.name == "offload"]
    return event.facts


async def test_offload_notes_what_it_was_decided_by(dispatcher, engine, peer, worker):
    peer.replies = [FIRST, DONE]
    peer.max_batched_tokens, peer.load = (
        256,
        WorkerLoad(waiting_tokens=64, num_waiting=2, credit_tokens=512),
    )
    worker.policy = PolicyConfig(offload=OffloadPolicy(prefill_length_threshold=10))
    worker.pair_rates.add("p", 10, 1.0)
    await reported(worker, engine)
    with begin_trace("r") as trace:
        await collect(dispatcher, "auto")

    assert offload_event(trace) == {
        "prefill": "remote",
        "reason": "long",
        "policy": "rule",
        "threshold": 10,
        "uncached_tokens": 10,
        "prefill_queue": 2,
        "decode_active": 0,
        "decode_ratio": 0.25,
        "transfer_seconds": 1.0,
        "local_seconds": 0.0,
        "remote_seconds": 0.0,
    }
    assert [
        event.name for event in trace.events if event.name not in (*LIFETIME, "first_step")
    ] == ["offload", "credit"]
    assert trace.events[1].facts["peer"] == "p"


@pytest.mark.parametrize(("max_model_len", "reason"), [(10, "no_prefill_worker"), (11, "long")])
async def test_offload_goes_by_workers_that_take_the_prompt(
    dispatcher, peer, worker, max_model_len, reason
):
    peer.replies = [FIRST, DONE]
    peer.max_model_len = max_model_len
    worker.policy = PolicyConfig(offload=OffloadPolicy(prefill_length_threshold=1))
    with begin_trace("r") as trace:
        tokens = await collect(dispatcher, "auto")

    assert (offload_event(trace)["reason"], tokens[0].prefill) == (
        reason,
        "local" if max_model_len == 10 else "remote",
    )


@pytest.mark.parametrize(
    ("policy", "place"),
    [
        (OffloadPolicy(prefill_length_threshold=1, max_transfer_milliseconds=999), "local"),
        (OffloadPolicy(prefill_length_threshold=1, length_thresholds={"cpu": 11}), "local"),
        (OffloadPolicy(decode_busy_ratio=0.2), "remote"),
        (OffloadPolicy(decode_busy_ratio=0.25), "local"),
    ],
)
async def test_offload_changes_with_the_policy_in_force(
    dispatcher, engine, peer, worker, policy, place
):
    peer.replies = [FIRST, DONE]
    peer.max_batched_tokens, peer.load = 256, WorkerLoad(credit_tokens=512)
    worker.pair_rates.add("p", 10, 1.0)
    await reported(worker, engine)
    worker.policy = PolicyConfig(offload=policy)

    assert (await collect(dispatcher, "auto"))[0].prefill == place


async def test_remote_prefill_measures_the_pair_and_the_wait_for_its_credit(
    dispatcher, peer, worker
):
    peer.replies = [FIRST, replace(DONE, busy_seconds=0.5)]
    await collect(dispatcher)

    assert worker.pair_rates.seconds("p", 12) == 1.0  # 6 of 10 tokens were not cached
    assert worker.metrics.registry.get_sample_value("pdcluster_credit_wait_seconds_count") == 1


async def test_waits_for_a_credit_are_counted_by_their_end(dispatcher, peer, peers, worker):
    peer.replies = [FIRST, DONE]
    await collect(dispatcher)
    silent = RecordingPeer("silent")
    peers[:] = [silent]
    task = asyncio.create_task(collect(dispatcher))
    while not silent.claims:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    peers.clear()
    with pytest.raises(RequestError, match="no prefill worker is ready"):
        await collect(dispatcher)
    value = worker.metrics.registry.get_sample_value
    ends = ("granted", "cancelled", "no_prefill_worker")

    assert [value("pdcluster_credit_requests_total", {"outcome": end}) for end in ends] == [1, 1, 1]
    assert silent.released == ["r"]


async def test_slo_feedback_moves_the_threshold_by_what_requests_took(worker):
    """Each prompt takes 10 s here and is there at once: the clock is the test's."""
    clock = FakeClock()
    offloading = OffloadDecider(worker, list, list)
    feedback = SloFeedback()
    for side in ("local", "remote") * 4:
        timer = RequestTimer(feedback, TtftEstimates(), "r", 100, clock)
        timer.sent(side)
        clock.advance(10.0 if side == "local" else 0.01)
        timer.token(Generated(Token("r", 1), side))
        clock.advance(0.02)
        timer.token(Generated(Token("r", 2, finish_reason="length")))
    policy = PolicyConfig(offload=OffloadPolicy(policy="sloFeedback")).offload

    assert feedback.threshold(policy.slo_feedback, 256, clock()) == round(256 / STEP)
    worker.policy = PolicyConfig(offload=policy)
    assert offloading.threshold(256) == 256  # of its own, which has seen nothing


@pytest.mark.parametrize(("policy", "prefill"), [("measured", "local"), ("rule", "remote")])
async def test_measured_keeps_a_long_prompt_from_a_side_that_is_measured_to_be_slower(
    dispatcher, peer, worker, policy, prefill
):
    peer.replies = [FIRST, DONE]
    costs = dispatcher._decider._estimates
    now = asyncio.get_running_loop().time()
    for number in range(MIN_SAMPLES):
        costs.first_token("local", str(number), 100, 0.1, now)
        costs.first_token("remote", str(number), 100, 0.3, now)
    worker.policy = PolicyConfig(
        offload=OffloadPolicy(policy=policy, prefill_length_threshold=5, min_offload_length=1)
    )
    with begin_trace("r") as told:
        made = await collect(dispatcher, "auto")

    assert made[0].prefill == prefill
    offload = next(event.facts for event in told.events if event.name == "offload")
    assert offload["reason"] == ("slower" if policy == "measured" else "long")
    assert (offload["local_seconds"], offload["remote_seconds"]) == (
        pytest.approx(0.01),
        pytest.approx(0.03),
    )


async def test_time_to_the_first_token_is_measured_for_both_sides_and_forgotten_with_the_request(
    dispatcher, peer
):
    costs = dispatcher._decider._estimates
    for mode in ("local", "remote"):
        peer.replies = [replace(FIRST, prefill_seconds=0.2), DONE]
        await collect(dispatcher, mode)

    assert costs._sides["remote"].num_samples == 1
    assert not any(side.waiting for side in costs._sides.values())
