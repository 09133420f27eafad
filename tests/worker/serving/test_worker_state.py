"""A worker's own state: counting requests, reports to peers, policy reload."""

import asyncio
from contextlib import aclosing

import pytest

from pdcluster_worker.config.policy import PolicyFile
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import Abort, AskSnapshot, BlockEvents
from pdcluster_worker.routing.prefill_choice import REQUESTING_HEADS
from pdcluster_worker.serving import worker_context as worker_module
from pdcluster_worker.serving.worker_context import merge
from tests.worker.serving.doubles import client_of, stats, until


async def test_worker_takes_requests_until_it_has_ended(worker):
    worker.announce("draining")
    with worker.request():
        assert worker.active == 1
    worker.announce("drained")
    worker.has_ended = True
    with pytest.raises(RequestError, match="drained") as caught, worker.request():
        pass

    assert (
        caught.value.status,
        caught.value.code,
        caught.value.retry_after_seconds,
        worker.active,
    ) == (503, "draining", 1, 0)


async def test_worker_tells_of_each_request_that_begins(worker):
    active: list[int] = []
    worker.on_request = lambda: active.append(worker.active)
    with worker.request(), worker.request():
        pass

    assert active == [1, 2]


async def test_worker_holds_requests_transfers_and_what_its_engine_has_not_reported(worker, engine):
    assert worker.num_holding == 1  # the engine has not said yet what it holds
    engine.answer = lambda _: [stats(8, num_transfers=2, num_inputs=len(engine.inputs))]
    client_of(worker).send(Abort("r"))
    assert worker.num_holding == 1
    while client_of(worker).stats is None:
        await asyncio.sleep(0)
    with worker.request():
        assert worker.num_holding == 3

    engine.answer = lambda _: [stats(8, num_inputs=1)]  # of before the message
    client_of(worker).send(Abort("r"))
    while client_of(worker).stats.num_transfers:
        await asyncio.sleep(0)
    assert worker.num_holding == 1


async def test_worker_reports_a_change_of_state_at_once(worker, monkeypatch):
    monkeypatch.setattr(worker_module, "REPORT_SECONDS", 3600.0)
    async with aclosing(worker.reports()) as reports, asyncio.timeout(5):
        assert (await anext(reports)).load.state == "ready"
        worker.announce("draining")
        assert (await anext(reports)).load.state == "draining"
        tracking = asyncio.create_task(anext(reports))
        await asyncio.sleep(0)
        worker.announce("ready")
        assert (await tracking).load.state == "ready"


async def test_worker_room_that_was_reported_before_the_wait_is_room(worker, engine):
    """An engine that frees blocks and goes idle says so once, perhaps before a task waits."""
    engine.say(stats(free_blocks=8))
    while client_of(worker).stats is None:
        await asyncio.sleep(0)

    await asyncio.wait_for(worker.wait_for_blocks(worker.engines.first, "r", 8), 5)
    waiting = asyncio.create_task(worker.wait_for_blocks(worker.engines.first, "r", 9))
    await asyncio.sleep(0)
    assert not waiting.done()
    engine.say(stats(free_blocks=9))
    await asyncio.wait_for(waiting, 5)


async def test_prompts_that_wait_for_a_prefix_are_on_the_worker(worker, engine):
    engine.say(stats(free_blocks=9))
    await until(lambda: client_of(worker).stats)
    worker.num_waiting_for_prefix = 2

    assert worker.load().num_waiting == worker.load().num_requests == 2
    (sample,) = worker.metrics.num_requests_waiting.collect()[0].samples
    assert sample.value == 0  # no reason for another worker


async def test_worker_tells_waiting_for_a_credit_from_waiting_for_its_own_blocks(worker, engine):
    """A request that found no blocks here is no reason for another prefill worker, and those behind
    it still are.
    """

    def shown() -> list[float]:
        metrics = worker.metrics
        gauges = (
            metrics.num_requests_waiting,
            metrics.prefill_queue_requests,
            metrics.prefill_queue_tokens,
        )
        return [gauge.collect()[0].samples[0].value for gauge in gauges]

    engine.say(stats(free_blocks=1))
    while client_of(worker).stats is None:
        await asyncio.sleep(0)
    for n in range(REQUESTING_HEADS + 2):
        worker.credit_queue.add(f"r{n}", 30 + n, 0)
    assert shown() == [0, 10, 345]

    waiting = [asyncio.create_task(worker.wait_for_blocks(worker.engines.first, "r2", 8))]
    await asyncio.sleep(0)
    assert shown() == [1, 9, 313]
    load = worker.load()
    assert (
        load.num_waiting,
        load.waiting_tokens,
        load.credit_queue_requests,
        load.credit_queue_tokens,
    ) == (1, 32, 9, 313)

    # When none of those that may ask does, none behind them can.
    waiting += [
        asyncio.create_task(worker.wait_for_blocks(worker.engines.first, f"r{n}", 8))
        for n in range(REQUESTING_HEADS)
        if n != 2
    ]
    await asyncio.sleep(0)
    assert shown() == [10, 0, 0]

    engine.say(stats(free_blocks=8))
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert shown() == [0, 10, 345]


async def test_worker_reports_begin_with_the_whole_cache_and_go_on_with_changes(
    worker, engine, monkeypatch
):
    monkeypatch.setattr(worker_module, "REPORT_SECONDS", 0.0)
    engine.say(BlockEvents([b"a", b"b"], [], 1))
    while not worker.engines.hashes():
        await asyncio.sleep(0)
    async with aclosing(worker.reports()) as reports:
        first = await anext(reports)
        engine.say(BlockEvents([b"c"], [b"a"], 2))
        while b"c" not in worker.engines.hashes():
            await asyncio.sleep(0)
        second = await anext(reports)

    assert (first.snapshot, set(first.stored)) == (True, {b"a", b"b"})
    assert (second.snapshot, second.stored, second.removed) == (False, (b"c",), (b"a",))


def test_merge_names_each_hash_once():
    events = [
        BlockEvents([b"a", b"b"], [], 1),
        BlockEvents([], [b"a"], 2),
        BlockEvents([b"a"], [b"b"], 3),
    ]

    assert merge(events) == ([b"a"], [b"b"], False)


def test_merge_starts_over_at_a_snapshot():
    events = [
        BlockEvents([b"a", b"b"], [b"z"], 1),
        BlockEvents([b"c", b"d"], [], 3, is_cleared=True),
        BlockEvents([b"e"], [b"c"], 4),
    ]

    assert merge(events) == ([b"d", b"e"], [], True)


async def test_worker_that_missed_block_events_asks_for_all_of_them_and_tells_its_peers(
    worker, engine, monkeypatch
):
    """[V19], [Y11]: a repeat changes nothing; after a gap nothing is taken until a snapshot."""
    monkeypatch.setattr(worker_module, "REPORT_SECONDS", 0.0)
    engine.answer = lambda message: (
        [BlockEvents([b"d"], [], 5, is_cleared=True)] if isinstance(message, AskSnapshot) else ()
    )
    async with aclosing(worker.reports()) as reports, asyncio.timeout(5):
        await anext(reports)
        engine.say(BlockEvents([b"a"], [], 1))
        engine.say(BlockEvents([b"b"], [b"a"], 1))
        while not worker.engines.hashes():
            await asyncio.sleep(0)
        assert (await anext(reports)).stored == (b"a",)
        engine.say(BlockEvents([b"c"], [], 3))
        engine.say(BlockEvents([b"d"], [], 4))
        while worker.engines.hashes() != {b"d"}:
            assert worker.engines.hashes() == {b"a"}
            await asyncio.sleep(0)
        report = await anext(reports)
        assert (report.stored, report.removed, report.snapshot) == ((b"d",), (), True)
    assert engine.inputs == [AskSnapshot()]


async def test_worker_cached_tokens_leaves_one_token_to_compute(worker, engine):
    engine.say(BlockEvents([b"0", b"1"], [], 1))
    while not worker.engines.hashes():
        await asyncio.sleep(0)
    engines, first = worker.engines, worker.engines.first

    # block-aligned: the last block is computed again
    assert engines.cached_tokens(first, [b"0", b"1"], 8) == 4
    assert engines.cached_tokens(first, [b"0", b"1"], 9) == 8
    assert engines.cached_tokens(first, [b"x", b"1"], 9) == 0


def test_policy_file_takes_good_changes_and_keeps_the_last_good_one(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("offload: {prefillLengthThreshold: 100}\n")
    policy = PolicyFile(path)
    assert policy.current.offload.prefill_length_threshold == 100

    path.write_text("offload: {prefillLengthThreshold: 50}\n")
    assert policy.reload()
    assert policy.current.offload.prefill_length_threshold == 50

    for bad in (
        "offload: {prefillLengthThreshold: -1}\n",
        "offload: {prefillQueueMax: x}\n",
        "offload: [\n",
    ):
        path.write_text(bad)
        assert not policy.reload()
    path.unlink()
    assert not policy.reload()
    assert policy.current.offload.prefill_length_threshold == 50
