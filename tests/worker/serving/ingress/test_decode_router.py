"""The choice of a decode worker on real parts: loads, prefix matches, charges, hints, and the hold
while all are busy [Y13].
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from pdcluster_schema.faults import validated
from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.peers import Generated, PrefillMode, WorkerLoad
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.routing.decode_choice import RouteHints
from pdcluster_worker.serving.ingress.decode_router import TAINT_SECONDS, DecodeRouter
from pdcluster_worker.serving.ingress.ingress import Ingress
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.tracing import request_trace
from tests.worker.serving.doubles import dispatcher_of

BLOCK = 4
IDLE = WorkerLoad(free_blocks=100, total_blocks=100)


class NamedPeer:
    """A decode worker with a name and a load, which answers one token when it is let."""

    def __init__(self, key: str, load: WorkerLoad = IDLE) -> None:
        self.key = key
        self.load = load
        self.may_answer = asyncio.Event()
        self.requested: list[str] = []

    async def generate(
        self, spec: RequestSpec, prefill: PrefillMode
    ) -> AsyncGenerator[Generated, None]:
        self.requested.append(spec.request_id)
        await self.may_answer.wait()
        yield Generated(Token(spec.request_id, 5, finish_reason="stop"), "local")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def spec(name: str, num_blocks: int = 4, first: int = 1) -> RequestSpec:
    return RequestSpec(name, [first] * BLOCK * num_blocks, SamplingParams(max_tokens=2, seed=1))


def set_policy(worker: WorkerContext, **score: Any) -> None:
    worker.policy = validated(PolicyConfig, {"decodeScore": score})


def router(
    worker: WorkerContext, peers: Sequence[NamedPeer], clock: Clock | None = None
) -> DecodeRouter:
    return DecodeRouter(worker, dispatcher_of(worker), lambda: list(peers), "own", clock or Clock())


def choose(
    chooser: DecodeRouter,
    spec: RequestSpec,
    may_run_locally: bool = False,
    failed: Sequence[str] = (),
) -> str:
    peer = chooser.choose(spec, may_run_locally, failed)
    return "own" if peer is None else peer.key


@pytest.mark.parametrize("policy", ["prefixAware", "kvAware", "latencyAware"])
async def test_request_goes_where_events_say_that_its_prefix_is_cached(worker, policy):
    peers = [NamedPeer(key) for key in "abc"]
    set_policy(worker, policy=policy)
    worker.blocks.snapshot("b", worker.hashes(spec("r")))

    assert choose(router(worker, peers), spec("r")) == "b"


async def test_own_prefix_cache_counts_as_those_of_others(worker):
    set_policy(worker, policy="prefixAware")
    worker.engines._blocks.snapshot("0", worker.hashes(spec("r")))

    assert choose(router(worker, [NamedPeer("a")]), spec("r"), may_run_locally=True) == "own"


async def test_what_was_just_sent_counts_as_cached_until_events_can_tell(worker):
    """A burst of one prefix within a second goes to one worker; later only events count."""
    peers, clock = [NamedPeer(key) for key in "abcd"], Clock()
    set_policy(worker, policy="prefixAware", hotspotPrevention=False)
    chooser = router(worker, peers, clock)
    burst = {choose(chooser, spec(f"r{n}")) for n in range(10)}
    clock.now += 60

    assert len(burst) == 1
    assert (
        chooser._matches(worker.policy.decode_score, worker.hashes(spec("r")), clock.now)[0] == {}
    )


async def test_y11_without_events_what_was_sent_in_the_last_120_seconds_counts(worker):
    peers, clock = [NamedPeer(key) for key in "abcd"], Clock()
    set_policy(worker, policy="prefixAware", kvEvents=False)
    worker.blocks.snapshot("d", worker.hashes(spec("r")))  # not looked at
    chooser = router(worker, peers, clock)
    policy, hashes = worker.policy.decode_score, worker.hashes(spec("r"))
    first = choose(chooser, spec("r"))
    clock.now += 120
    assert chooser._matches(policy, hashes, clock.now)[0] == {first: 4}

    clock.now += 1
    assert chooser._matches(policy, hashes, clock.now)[0] == {}


async def test_another_engine_of_a_pod_has_none_of_what_was_sent_to_the_first(worker):
    peers, clock = [NamedPeer("a")], Clock()
    set_policy(worker, policy="prefixAware", kvEvents=False)
    chooser = router(worker, peers, clock)
    choose(chooser, spec("r"))
    clock.now += 1
    peers[0] = NamedPeer("a")
    chooser._peers((), clock.now)

    assert (
        chooser._matches(worker.policy.decode_score, worker.hashes(spec("r")), clock.now)[0] == {}
    )


async def test_y12_requests_sent_since_a_report_count(worker):
    """Three equal workers, one report: six requests are two for each."""
    peers = [NamedPeer(key, WorkerLoad(num_running=5)) for key in "abc"]
    chooser = router(worker, peers)

    assert sorted(choose(chooser, spec(f"r{n}")) for n in range(6)) == list("aabbcc")


async def test_y12_prefill_is_charged_until_the_first_token_and_blocks_until_the_end(worker):
    peer = NamedPeer("a")
    set_policy(worker, policy="kvAware")
    chooser = router(worker, [peer])

    def load() -> tuple[int, int, int]:
        (candidate,) = chooser._candidates(worker.policy.decode_score, {"a": peer}, False, [], 0.0)
        return candidate.num_requests, candidate.prefill_tokens, candidate.decode_blocks

    two = [spec("r0"), spec("r1")]
    with chooser.track(two):
        choose(chooser, two[0])
        assert load() == (2, 16, 5)  # the second choice finds the prompt cached
        chooser.on_token("r0")
        assert load() == (2, 0, 5)
    assert load() == (0, 0, 0)


async def test_policy_is_the_one_in_force_at_each_request(worker):
    chooser = router(worker, [NamedPeer("a", WorkerLoad(num_running=9)), NamedPeer("b")])
    assert choose(chooser, spec("r0")) == "b"

    set_policy(worker, policy="roundRobin")
    assert [choose(chooser, spec(f"r{n}")) for n in range(1, 5)] == ["a", "b", "a", "b"]


async def test_y10_worker_that_failed_costs_more_for_a_while(worker):
    clock, peers = (
        Clock(),
        [NamedPeer("a", WorkerLoad(num_running=2)), NamedPeer("b", WorkerLoad(num_running=3))],
    )
    set_policy(worker, failureTaint=2.0)
    chooser = router(worker, peers, clock)
    assert choose(chooser, spec("r0"), failed=["a"]) == "b"

    with chooser.track([spec("r1")]):
        assert choose(chooser, spec("r1")) == "b"
    clock.now += TAINT_SECONDS
    assert choose(chooser, spec("r2")) == "a"


async def test_y10_worker_that_is_full_is_left_out_and_costs_no_more(worker):
    set_policy(worker, failureTaint=2.0)
    chooser = router(
        worker,
        [NamedPeer("a", WorkerLoad(num_running=2)), NamedPeer("b", WorkerLoad(num_running=3))],
    )
    chosen = chooser.choose(spec("r0"), False, full=["a"])

    assert chosen is not None
    assert chosen.key == "b"
    assert choose(chooser, spec("r1")) == "a"


async def test_loads_of_reports_reach_the_policies(worker):
    worker.policy = PolicyConfig()
    peers = [
        NamedPeer("busy", WorkerLoad(busy_ratio=0.9, free_blocks=50, total_blocks=100)),
        NamedPeer(
            "moves", WorkerLoad(memory_bandwidth_ratio=0.5, free_blocks=90, total_blocks=100)
        ),
        NamedPeer("full", WorkerLoad(free_blocks=0, total_blocks=100)),
    ]
    for policy, expected in (("capacityAware", "moves"), ("latencyAware", "moves")):
        set_policy(worker, policy=policy)
        assert choose(router(worker, peers), spec("r")) == expected


async def test_hints_pin_a_worker_or_keep_a_session_together(worker):
    peers = [NamedPeer(key) for key in "abc"]
    chooser = router(worker, peers)
    with chooser.track([spec("r")], RouteHints(worker="c")):
        assert choose(chooser, spec("r"), may_run_locally=True) == "c"
    homes = set()
    for n in range(5):
        with chooser.track([spec(f"s{n}")], RouteHints(session="chat-7")):
            homes.add(choose(chooser, spec(f"s{n}"), may_run_locally=True))
    assert len(homes) == 1


async def test_request_that_names_its_prefill_worker_stays_where_it_was_sent(worker):
    chooser = router(worker, [NamedPeer("a")])
    named = msgspec.structs.replace(spec("r"), prefiller="p:8000")

    assert all(choose(chooser, named, may_run_locally=True) == "own" for _ in range(4))
    assert choose(chooser, named, may_run_locally=False) == "a"


async def test_hints_may_replace_the_policy(worker):
    chooser = router(worker, [NamedPeer("a", WorkerLoad(num_running=9)), NamedPeer("b")])
    score = worker.policy.decode_score.model_copy(update={"policy": "roundRobin"})
    with chooser.track([spec("r")], RouteHints(decode_score=score)):
        assert choose(chooser, spec("r")) == "a"


async def test_pinned_worker_that_is_not_there_is_refused_by_name(worker):
    chooser = router(worker, [NamedPeer("a")])
    with (
        chooser.track([spec("r")], RouteHints(worker="gone")),
        pytest.raises(RequestError, match="'gone' takes no requests") as caught,
    ):
        choose(chooser, spec("r"))

    assert (caught.value.status, caught.value.param) == (503, "pdcluster.route.worker")


async def test_decision_is_noted_with_its_numbers(worker):
    chooser = router(
        worker,
        [NamedPeer("a", WorkerLoad(num_running=2)), NamedPeer("b", WorkerLoad(num_running=1))],
    )
    with request_trace.begin_trace("r") as noted:
        choose(chooser, spec("r"))
    (event,) = noted.events

    assert event.name == "decode_worker"
    assert event.facts == {
        "worker": "b",
        "rule": "leastRequest",
        "costs": "b=1.50 a=2.50",
        "matched_blocks": 0,
        "num_requests": 1,
        "prefill_tokens": 0,
    }


def drain(worker: WorkerContext, *peers: NamedPeer) -> Ingress:
    worker.announce("draining")
    return Ingress(worker, dispatcher_of(worker), lambda: list(peers))


async def collect(ingress: Ingress, one: RequestSpec) -> list[int]:
    async with aclosing(ingress.generate([one], "auto")) as tokens:
        return [generated.token.token_id async for generated in tokens]


async def test_y13_requests_wait_while_every_worker_is_busy_in_order_of_arrival(worker):
    peer = NamedPeer("a", WorkerLoad(waiting_tokens=101))
    set_policy(worker, queueThresholdTokens=100)
    ingress = drain(worker, peer)
    peer.may_answer.set()
    tasks = [asyncio.create_task(collect(ingress, spec(f"r{n}"))) for n in range(3)]
    while ingress._router._held.num_requests < 3:
        await asyncio.sleep(0)
    assert not peer.requested

    peer.load = WorkerLoad(waiting_tokens=100)
    ingress._router._eased.set()
    assert await asyncio.gather(*tasks) == [[5], [5], [5]]
    assert peer.requested == ["r0", "r1", "r2"]


async def test_y13_one_worker_below_the_threshold_is_enough(worker):
    peers = [
        NamedPeer("a", WorkerLoad(waiting_tokens=1000)),
        NamedPeer("b", WorkerLoad(num_running=9)),
    ]
    set_policy(worker, queueThresholdTokens=100)
    peers[1].may_answer.set()
    peers[0].may_answer.set()

    assert await collect(drain(worker, *peers), spec("r")) == [5]


async def test_y13_too_many_that_wait_are_refused(worker):
    worker.policy = validated(
        PolicyConfig,
        {"decodeScore": {"queueThresholdTokens": 1}, "admission": {"maxQueuedRequests": 1}},
    )
    ingress = drain(worker, NamedPeer("a", WorkerLoad(waiting_tokens=2)))
    first = asyncio.create_task(collect(ingress, spec("r0")))
    while not ingress._router._held.num_requests:
        await asyncio.sleep(0)
    refusals = []
    for seconds_ago in (1.0, 7200.0):
        ingress._router._held_seconds, ingress._router._held_at = (
            30.0,
            ingress._router._clock() - seconds_ago,
        )
        with pytest.raises(RequestError) as caught:
            await collect(ingress, spec("r1"))
        refusals.append(caught.value.retry_after_seconds)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)

    assert refusals == [30, 1]  # a wait of hours ago says nothing of now
    assert (caught.value.code, ingress._router._held.num_requests, worker.active) == (
        "queue_full",
        0,
        0,
    )


async def test_requests_that_end_or_are_given_up_leave_no_account(worker):
    peer = NamedPeer("a")
    ingress = drain(worker, peer)
    task = asyncio.create_task(collect(ingress, spec("r0")))
    while not peer.requested:
        await asyncio.sleep(0)
    assert ingress._router._load.num_requests("a") == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert (ingress._router._load.num_requests("a"), ingress._router._routed) == (0, {})


async def test_choice_goes_by_the_newest_report_of_each_worker(worker):
    """Candidates made of a report are kept until the next one, and no longer."""
    peers = [NamedPeer("a"), NamedPeer("b", WorkerLoad(num_running=3))]
    chooser = router(worker, peers)
    assert choose(chooser, spec("r1")) == "a"

    peers[0].load, peers[1].load = WorkerLoad(num_running=5), WorkerLoad()

    assert choose(chooser, spec("r2")) == "b"


async def test_another_engine_of_a_pod_is_not_known_by_the_report_of_the_former_one(worker):
    peers = [NamedPeer("a", WorkerLoad(num_running=3)), NamedPeer("b", WorkerLoad(num_running=2))]
    chooser = router(worker, peers)
    assert choose(chooser, spec("r1")) == "b"

    peers[0] = NamedPeer("a")

    assert choose(chooser, spec("r2")) == "a"
