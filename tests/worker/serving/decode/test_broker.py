"""Late binding: the workers asked, the one chosen, the credits given back."""

import asyncio

import pytest
from msgspec.structs import replace

from pdcluster_schema.routing import PrefillScoreSpec
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from pdcluster_worker.routing.prefill_choice import CreditQueue
from pdcluster_worker.serving.decode.broker import CreditBroker
from tests.worker.serving.doubles import RecordingPeer

BLOCK_SIZE = 4


class Pool:
    """A broker over a changeable list of prefill workers."""

    def __init__(self, *peers: RecordingPeer) -> None:
        self.peers = list(peers)
        self.queue = CreditQueue()
        self.broker = CreditBroker(self.queue, lambda: self.peers, PrefillScoreSpec, BLOCK_SIZE)

    def acquire(self, request_id: str, tokens: int = 100) -> "asyncio.Task[RecordingPeer | None]":
        self.queue.add(request_id, tokens, 0)
        spec = RequestSpec(request_id, [0] * tokens, SamplingParams(max_tokens=1, seed=0))
        return asyncio.create_task(self.broker.acquire(spec, [b"h"] * (tokens // BLOCK_SIZE)))

    def answer(self, peer: RecordingPeer, request_id: str, *, granted: bool) -> None:
        self.broker.on_credit(peer, request_id, granted)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def requested(*peers: RecordingPeer) -> "tuple[Pool, asyncio.Task[RecordingPeer | None]]":
    """A request of 100 tokens that has asked these for a credit."""
    pool = Pool(*peers)
    task = pool.acquire("r")
    await settle()
    return pool, task


async def test_broker_asks_every_prefill_worker_for_the_uncached_tokens():
    empty, warm = RecordingPeer("a"), RecordingPeer("b", matched_blocks=5)
    _, task = await requested(empty, warm)

    assert (empty.claims, warm.claims) == ([("r", 100)], [("r", 80)])
    task.cancel()


async def test_broker_chooses_the_best_prefix_among_those_that_grant():
    empty, warm = RecordingPeer("a"), RecordingPeer("b", matched_blocks=5)
    pool, task = await requested(empty, warm)
    pool.answer(empty, "r", granted=True)
    assert not task.done()
    pool.answer(warm, "r", granted=True)

    assert await task is warm
    assert (empty.released, warm.released) == (["r"], [])


async def test_broker_takes_the_first_grant_when_none_had_room():
    first, second = RecordingPeer("a"), RecordingPeer("b")
    pool, task = await requested(first, second)
    pool.answer(first, "r", granted=False)
    pool.answer(second, "r", granted=False)
    pool.answer(second, "r", granted=True)

    assert await task is second
    assert first.released == ["r"]


async def test_broker_does_not_wait_without_end_for_a_silent_worker():
    silent, quick = RecordingPeer("a"), RecordingPeer("b")
    pool, task = await requested(silent, quick)
    pool.answer(quick, "r", granted=True)

    assert await task is quick
    assert silent.released == ["r"]


async def test_broker_answers_none_when_no_prefill_worker_is_left():
    peer = RecordingPeer("a")
    pool, task = await requested(peer)
    pool.peers.clear()
    pool.broker.on_lost(peer)

    assert await task is None


async def test_broker_asks_a_worker_that_joins():
    first, late = RecordingPeer("a"), RecordingPeer("b")
    pool, task = await requested(first)
    pool.answer(first, "r", granted=False)
    pool.peers.append(late)
    pool.broker.request_credits()
    pool.answer(late, "r", granted=True)

    assert await task is late


@pytest.mark.parametrize("is_granted", [None, "then", "before"])
async def test_broker_cancelled_request_gives_back_its_wants_and_its_grant(is_granted):
    """Also one whose credit comes in that moment, before the waiting coroutine has seen it."""
    peer = RecordingPeer("a")
    pool, task = await requested(peer)
    if is_granted == "before":
        pool.answer(peer, "r", granted=True)
    task.cancel()
    if is_granted == "then":
        pool.answer(peer, "r", granted=True)

    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(peer.released) == {"r"}


async def test_broker_returns_a_grant_that_no_request_waits_for():
    peer = RecordingPeer("a")
    pool = Pool(peer)
    pool.answer(peer, "gone", granted=True)

    assert peer.released == ["gone"]


async def test_broker_only_the_head_of_the_queue_asks():
    peer = RecordingPeer("a")
    pool = Pool(peer)
    tasks = [pool.acquire(f"r{i}") for i in range(12)]
    await settle()
    assert [request_id for request_id, _ in peer.claims] == [f"r{i}" for i in range(8)]

    pool.answer(peer, "r0", granted=True)
    assert await tasks[0] is peer
    pool.queue.discard("r0")
    pool.broker.request_credits()

    assert peer.claims[-1][0] == "r8"
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks[1:], return_exceptions=True)


async def test_broker_takes_back_what_a_draining_worker_has_not_granted():
    draining, other = RecordingPeer("a"), RecordingPeer("b")
    pool = Pool(draining)
    queued, granted = pool.acquire("queued"), pool.acquire("granted")
    await settle()
    pool.answer(draining, "queued", granted=False)
    pool.answer(draining, "granted", granted=True)
    draining.ready = False
    pool.peers[:] = [other]
    pool.broker.on_change(draining)

    assert draining.released == ["queued"]
    assert [request_id for request_id, _ in other.claims] == ["queued"]
    assert await granted is draining  # a credit that is out stays good
    pool.answer(other, "queued", granted=True)
    assert await queued is other


async def test_broker_gives_a_credit_back_to_a_draining_worker_when_another_one_grants():
    draining, other = RecordingPeer("a", matched_blocks=5), RecordingPeer("b")
    pool, task = await requested(draining, other)
    pool.answer(draining, "r", granted=True)
    draining.ready = False
    pool.peers.remove(draining)
    pool.broker.on_change(draining)
    pool.answer(other, "r", granted=True)

    assert await task is other
    assert draining.released == ["r"]


async def test_broker_last_prefill_worker_draining_means_local():
    peer = RecordingPeer("a")
    pool, task = await requested(peer)
    pool.answer(peer, "r", granted=False)
    peer.ready = False
    pool.peers.clear()
    pool.broker.on_change(peer)

    assert await task is None


async def test_broker_does_not_ask_a_worker_that_takes_no_prompt_of_that_length():
    short, long = RecordingPeer("a"), RecordingPeer("b")
    short.max_model_len, long.max_model_len = 100, 101
    pool, task = await requested(short, long)
    pool.answer(long, "r", granted=True)

    assert await task is long
    assert (short.claims, short.released) == ([], [])


async def test_broker_has_no_peer_to_ask_where_none_is_or_all_take_shorter_prompts_only():
    peer = RecordingPeer("a")
    peer.max_model_len = 100

    assert await Pool(peer).acquire("r", tokens=100) is None
    assert peer.claims == []
    assert await Pool().acquire("r") is None


async def test_broker_counts_what_the_kv_takes_on_its_way():
    far, near = RecordingPeer("a", matched_blocks=5), RecordingPeer("b")
    pool = Pool(far, near)
    seconds = {"a": 0.5, "b": 0.01}
    policy = PrefillScoreSpec(transfer_weight=0.1)
    pool.broker = CreditBroker(
        pool.queue,
        lambda: pool.peers,
        lambda: policy,
        BLOCK_SIZE,
        lambda key, tokens: seconds[key] * tokens / 100,
    )
    task = pool.acquire("r", tokens=100)
    await settle()
    pool.answer(far, "r", granted=True)  # 20 cached tokens, and 50 for the way
    pool.answer(near, "r", granted=True)

    assert await task is near


async def test_broker_asks_only_workers_that_have_the_very_adapter():
    """Without one the prompt is prefilled at home."""
    without, other, same = (RecordingPeer(key) for key in "abc")
    other.load = replace(other.load, adapters={"sql": "w2"})
    same.load = replace(same.load, adapters={"sql": "w1"})
    pool = Pool(without, other, same)
    spec = RequestSpec(
        "r",
        [0] * 100,
        SamplingParams(max_tokens=1, seed=0),
        adapter="sql",
        adapter_weights="w1",
    )
    pool.queue.add("r", 100, 0)
    task = asyncio.create_task(pool.broker.acquire(spec, []))
    await settle()
    assert [peer.claims for peer in (without, other, same)] == [[], [], [("r", 100)]]
    pool.answer(same, "r", granted=True)
    assert await task is same

    pool.peers = [without, other]
    assert await pool.broker.acquire(spec, []) is None
