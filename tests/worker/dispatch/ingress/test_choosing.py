"""The choice of a decode worker on real parts: loads, prefix matches, charges, hints, and the hold
while all are busy [Y13].
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from pdcluster_worker.config.policy import PolicyConfig
from pdcluster_worker.config.routing import PrefillScorePolicy
from pdcluster_worker.dispatch.decode.broker import CreditBroker
from pdcluster_worker.dispatch.decode.decoding import DecodeDispatcher
from pdcluster_worker.dispatch.decode.remote import RemotePrefill
from pdcluster_worker.dispatch.ingress.choosing import TAINT_SECONDS, Choosing
from pdcluster_worker.dispatch.ingress.ingress import Ingress
from pdcluster_worker.dispatch.worker import Worker
from pdcluster_worker.errors import RequestError
from pdcluster_worker.journeys import journey
from pdcluster_worker.messages.peers import Generated, Load, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec, Sampling, Token
from pdcluster_worker.routing.hints import RouteHints

BLOCK = 4
IDLE = Load(free_blocks=100, total_blocks=100)


class NamedPeer:
    """A decode worker with a name and a load, which answers one token when it is let."""

    def __init__(self, key: str, load: Load = IDLE) -> None:
        self.key = key
        self.load = load
        self.may_answer = asyncio.Event()
        self.asked: list[str] = []

    async def generate(
        self, spec: RequestSpec, prefill: PrefillMode
    ) -> AsyncGenerator[Generated, None]:
        self.asked.append(spec.request_id)
        await self.may_answer.wait()
        yield Generated(Token(spec.request_id, 5, finish_reason="stop"), "local")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def spec(name: str, num_blocks: int = 4, first: int = 1) -> RequestSpec:
    return RequestSpec(name, [first] * BLOCK * num_blocks, Sampling(max_tokens=2, seed=1))


def set_policy(worker: Worker, **score: Any) -> None:
    worker.policy = msgspec.convert({"decodeScore": score}, PolicyConfig)


def here(worker: Worker) -> DecodeDispatcher:
    return DecodeDispatcher(
        worker,
        RemotePrefill(worker, CreditBroker(worker.credit_queue, list, PrefillScorePolicy, BLOCK)),
        list,
        list,
    )


def choosing(worker: Worker, peers: Sequence[NamedPeer], clock: Clock | None = None) -> Choosing:
    return Choosing(worker, here(worker), lambda: list(peers), "own", clock or Clock())


def choose(
    chooser: Choosing, spec: RequestSpec, may_run_here: bool = False, failed: Sequence[str] = ()
) -> str:
    peer = chooser.choose(spec, may_run_here, failed)
    return "own" if peer is None else peer.key


@pytest.mark.parametrize("policy", ["prefixAware", "kvAware", "latencyAware"])
async def test_request_goes_where_events_say_that_its_prefix_is_cached(
    worker: Worker, policy: str
) -> None:
    peers = [NamedPeer(key) for key in "abc"]
    set_policy(worker, policy=policy)
    worker.blocks.snapshot("b", worker.hashes(spec("r")))

    assert choose(choosing(worker, peers), spec("r")) == "b"


async def test_blocks_that_are_gone_attract_no_more(worker: Worker) -> None:
    peers = [
        NamedPeer("a", Load(num_running=1)),
        NamedPeer("b", Load(num_running=1)),
        NamedPeer("c"),
    ]
    set_policy(worker, policy="prefixAware")
    worker.blocks.snapshot("b", worker.hashes(spec("r")))
    worker.blocks.apply("b", [], worker.hashes(spec("r"))[:1])

    assert choose(choosing(worker, peers), spec("r")) == "c"


async def test_own_prefix_cache_counts_as_those_of_others(worker: Worker) -> None:
    set_policy(worker, policy="prefixAware")
    worker.engines._blocks.snapshot("0", worker.hashes(spec("r")))

    assert choose(choosing(worker, [NamedPeer("a")]), spec("r"), may_run_here=True) == "own"


async def test_what_was_just_sent_counts_as_cached_until_events_can_tell(worker: Worker) -> None:
    """A burst of one prefix within a second goes to one worker; later only events count."""
    peers, clock = [NamedPeer(key) for key in "abcd"], Clock()
    set_policy(worker, policy="prefixAware", hotspotPrevention=False)
    chooser = choosing(worker, peers, clock)
    burst = {choose(chooser, spec(f"r{n}")) for n in range(10)}
    clock.now += 60

    assert len(burst) == 1
    assert (
        chooser._matches(worker.policy.decode_score, worker.hashes(spec("r")), clock.now)[0] == {}
    )


async def test_y11_without_events_what_was_sent_in_the_last_120_seconds_counts(
    worker: Worker,
) -> None:
    peers, clock = [NamedPeer(key) for key in "abcd"], Clock()
    set_policy(worker, policy="prefixAware", kvEvents=False)
    worker.blocks.snapshot("d", worker.hashes(spec("r")))  # not looked at
    chooser = choosing(worker, peers, clock)
    policy, hashes = worker.policy.decode_score, worker.hashes(spec("r"))
    first = choose(chooser, spec("r"))
    clock.now += 120
    assert chooser._matches(policy, hashes, clock.now)[0] == {first: 4}

    clock.now += 1
    assert chooser._matches(policy, hashes, clock.now)[0] == {}


async def test_another_engine_of_a_pod_has_none_of_what_was_sent_to_the_first(
    worker: Worker,
) -> None:
    peers, clock = [NamedPeer("a")], Clock()
    set_policy(worker, policy="prefixAware", kvEvents=False)
    chooser = choosing(worker, peers, clock)
    choose(chooser, spec("r"))
    clock.now += 1
    peers[0] = NamedPeer("a")
    chooser._peers((), clock.now)

    assert (
        chooser._matches(worker.policy.decode_score, worker.hashes(spec("r")), clock.now)[0] == {}
    )


async def test_y12_requests_sent_since_a_report_count(worker: Worker) -> None:
    """Three equal workers, one report: six requests are two for each."""
    peers = [NamedPeer(key, Load(num_running=5)) for key in "abc"]
    chooser = choosing(worker, peers)

    assert sorted(choose(chooser, spec(f"r{n}")) for n in range(6)) == list("aabbcc")


async def test_y12_prefill_is_charged_until_the_first_token_and_blocks_until_the_end(
    worker: Worker,
) -> None:
    peer = NamedPeer("a")
    set_policy(worker, policy="kvAware")
    chooser = choosing(worker, [peer])

    def load() -> tuple[int, int, int]:
        (candidate,) = chooser._candidates(worker.policy.decode_score, {"a": peer}, False, [], 0.0)
        return candidate.num_requests, candidate.prefill_tokens, candidate.decode_blocks

    two = [spec("r0"), spec("r1")]
    with chooser.following(two):
        choose(chooser, two[0])
        assert load() == (2, 16, 5)  # the second choice finds the prompt cached
        chooser.on_token("r0")
        assert load() == (2, 0, 5)
    assert load() == (0, 0, 0)


async def test_policy_is_the_one_in_force_at_each_request(worker: Worker) -> None:
    chooser = choosing(worker, [NamedPeer("a", Load(num_running=9)), NamedPeer("b")])
    assert choose(chooser, spec("r0")) == "b"

    set_policy(worker, policy="roundRobin")
    assert [choose(chooser, spec(f"r{n}")) for n in range(1, 5)] == ["a", "b", "a", "b"]


async def test_y10_worker_that_failed_costs_more_for_a_while(worker: Worker) -> None:
    clock, peers = (
        Clock(),
        [NamedPeer("a", Load(num_running=2)), NamedPeer("b", Load(num_running=3))],
    )
    set_policy(worker, failureTaint=2.0)
    chooser = choosing(worker, peers, clock)
    assert choose(chooser, spec("r0"), failed=["a"]) == "b"

    with chooser.following([spec("r1")]):
        assert choose(chooser, spec("r1")) == "b"
    clock.now += TAINT_SECONDS
    assert choose(chooser, spec("r2")) == "a"


async def test_y10_worker_that_is_full_is_left_out_and_costs_no_more(worker: Worker) -> None:
    set_policy(worker, failureTaint=2.0)
    chooser = choosing(
        worker, [NamedPeer("a", Load(num_running=2)), NamedPeer("b", Load(num_running=3))]
    )
    chosen = chooser.choose(spec("r0"), False, full=["a"])

    assert chosen is not None
    assert chosen.key == "b"
    assert choose(chooser, spec("r1")) == "a"


async def test_loads_of_reports_reach_the_policies(worker: Worker) -> None:
    worker.policy = PolicyConfig()
    peers = [
        NamedPeer("busy", Load(busy_ratio=0.9, free_blocks=50, total_blocks=100)),
        NamedPeer("moves", Load(memory_bandwidth_ratio=0.5, free_blocks=90, total_blocks=100)),
        NamedPeer("full", Load(free_blocks=0, total_blocks=100)),
    ]
    for policy, expected in (("capacityAware", "moves"), ("latencyAware", "moves")):
        set_policy(worker, policy=policy)
        assert choose(choosing(worker, peers), spec("r")) == expected


async def test_hints_pin_a_worker_or_keep_a_session_together(worker: Worker) -> None:
    peers = [NamedPeer(key) for key in "abc"]
    chooser = choosing(worker, peers)
    with chooser.following([spec("r")], RouteHints(worker="c")):
        assert choose(chooser, spec("r"), may_run_here=True) == "c"
    homes = set()
    for n in range(5):
        with chooser.following([spec(f"s{n}")], RouteHints(session="chat-7")):
            homes.add(choose(chooser, spec(f"s{n}"), may_run_here=True))
    assert len(homes) == 1


async def test_request_that_names_its_prefill_worker_stays_where_it_was_sent(
    worker: Worker,
) -> None:
    chooser = choosing(worker, [NamedPeer("a")])
    named = msgspec.structs.replace(spec("r"), prefiller="p:8000")

    assert all(choose(chooser, named, may_run_here=True) == "own" for _ in range(4))
    assert choose(chooser, named, may_run_here=False) == "a"


async def test_hints_may_replace_the_policy(worker: Worker) -> None:
    chooser = choosing(worker, [NamedPeer("a", Load(num_running=9)), NamedPeer("b")])
    score = msgspec.structs.replace(worker.policy.decode_score, policy="roundRobin")
    with chooser.following([spec("r")], RouteHints(decode_score=score)):
        assert choose(chooser, spec("r")) == "a"


async def test_pinned_worker_that_is_not_there_is_refused_by_name(worker: Worker) -> None:
    chooser = choosing(worker, [NamedPeer("a")])
    with (
        chooser.following([spec("r")], RouteHints(worker="gone")),
        pytest.raises(RequestError, match="'gone' takes no requests") as caught,
    ):
        choose(chooser, spec("r"))

    assert (caught.value.status, caught.value.param) == (503, "pdcluster.route.worker")


async def test_decision_is_noted_with_its_numbers(worker: Worker) -> None:
    chooser = choosing(
        worker, [NamedPeer("a", Load(num_running=2)), NamedPeer("b", Load(num_running=1))]
    )
    with journey.begun("r") as noted:
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


def drain(worker: Worker, *peers: NamedPeer) -> Ingress:
    """An ingress that runs nothing itself."""
    worker.announce("draining")
    return Ingress(worker, here(worker), lambda: list(peers))


async def collect(ingress: Ingress, one: RequestSpec) -> list[int]:
    async with aclosing(ingress.generate([one], "auto")) as tokens:
        return [generated.token.token_id async for generated in tokens]


async def test_y13_requests_wait_while_every_worker_is_busy_in_order_of_arrival(
    worker: Worker,
) -> None:
    peer = NamedPeer("a", Load(waiting_tokens=101))
    set_policy(worker, queueThresholdTokens=100)
    ingress = drain(worker, peer)
    peer.may_answer.set()
    tasks = [asyncio.create_task(collect(ingress, spec(f"r{n}"))) for n in range(3)]
    while ingress._choosing._num_held < 3:
        await asyncio.sleep(0)
    assert not peer.asked

    peer.load = Load(waiting_tokens=100)
    ingress._choosing._eased.set()
    assert await asyncio.gather(*tasks) == [[5], [5], [5]]
    assert peer.asked == ["r0", "r1", "r2"]


async def test_y13_without_a_threshold_nothing_waits(worker: Worker) -> None:
    peer = NamedPeer("a", Load(waiting_tokens=1_000_000))
    peer.may_answer.set()

    assert await collect(drain(worker, peer), spec("r")) == [5]


async def test_y13_one_worker_below_the_threshold_is_enough(worker: Worker) -> None:
    peers = [NamedPeer("a", Load(waiting_tokens=1000)), NamedPeer("b", Load(num_running=9))]
    set_policy(worker, queueThresholdTokens=100)
    peers[1].may_answer.set()
    peers[0].may_answer.set()

    assert await collect(drain(worker, *peers), spec("r")) == [5]


async def test_y13_too_many_that_wait_are_refused(worker: Worker) -> None:
    worker.policy = msgspec.convert(
        {"decodeScore": {"queueThresholdTokens": 1}, "admission": {"maxQueuedRequests": 1}},
        PolicyConfig,
    )
    ingress = drain(worker, NamedPeer("a", Load(waiting_tokens=2)))
    first = asyncio.create_task(collect(ingress, spec("r0")))
    while not ingress._choosing._num_held:
        await asyncio.sleep(0)
    refusals = []
    for seconds_ago in (1.0, 7200.0):
        ingress._choosing._held_seconds, ingress._choosing._held_at = (
            30.0,
            ingress._choosing._clock() - seconds_ago,
        )
        with pytest.raises(RequestError) as caught:
            await collect(ingress, spec("r1"))
        refusals.append(caught.value.retry_after_seconds)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)

    assert refusals == [30, 1]  # a wait of hours ago says nothing of now
    assert (caught.value.code, ingress._choosing._num_held, worker.active) == ("queue_full", 0, 0)


async def test_requests_that_end_or_are_given_up_leave_no_account(worker: Worker) -> None:
    peer = NamedPeer("a")
    ingress = drain(worker, peer)
    task = asyncio.create_task(collect(ingress, spec("r0")))
    while not peer.asked:
        await asyncio.sleep(0)
    assert ingress._choosing._load.num_requests("a") == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert (ingress._choosing._load.num_requests("a"), ingress._choosing._routed) == (0, {})


async def test_choice_goes_by_the_newest_report_of_each_worker(worker: Worker) -> None:
    """Candidates made of a report are kept until the next one, and no longer."""
    peers = [NamedPeer("a"), NamedPeer("b", Load(num_running=3))]
    chooser = choosing(worker, peers)
    assert choose(chooser, spec("r1")) == "a"

    peers[0].load, peers[1].load = Load(num_running=5), Load()

    assert choose(chooser, spec("r2")) == "b"


async def test_another_engine_of_a_pod_is_not_known_by_the_report_of_the_former_one(
    worker: Worker,
) -> None:
    peers = [NamedPeer("a", Load(num_running=3)), NamedPeer("b", Load(num_running=2))]
    chooser = choosing(worker, peers)
    assert choose(chooser, spec("r1")) == "b"

    peers[0] = NamedPeer("a")

    assert choose(chooser, spec("r2")) == "a"
