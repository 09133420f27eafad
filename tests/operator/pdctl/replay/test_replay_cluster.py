"""The simulated cluster: pools, the prefill queue, and streams that decode."""

import doctest

import pytest

from pdctl.replay import pools
from pdctl.replay.pools import SimulatedPool, Streams, WorkerPhase
from pdctl.replay.queueing import DecodePhase, PrefillPhase, PromptBatch, Speeds
from pdctl.replay.trace import TraceLoad

SPEEDS = Speeds(
    prefill_tokens_per_second=100.0,
    step_seconds=0.1,
    stream_seconds=0.0,
    kv_tokens=1000.0,
    start_seconds=10.0,
)


def pool(replicas: int, role: str = "decode", speed: float = 1.0) -> SimulatedPool:
    return SimulatedPool(role, "x", "H100", speed, replicas)


def states(of: SimulatedPool) -> list[WorkerPhase]:
    return [worker.state for worker in of.workers]


def test_examples_hold():
    assert doctest.testmod(pools) == (0, 1)


def test_a_new_worker_is_ready_after_its_start():
    one = pool(1)
    one.scale(2, now=100.0)
    assert states(one) == [WorkerPhase.READY, WorkerPhase.STARTING]
    assert (one.facts().current, one.facts().ready) == (2, 1)

    one.advance(109.0, 10.0, None)
    assert states(one)[1] is WorkerPhase.STARTING
    one.advance(110.0, 10.0, None)
    assert states(one)[1] is WorkerPhase.READY


def test_highest_ordinal_drains_until_its_streams_end_and_one_that_starts_goes_at_once():
    one = pool(2)
    one.workers[1].streams.add(5.0, 10.0, 100.0)
    one.scale(3, now=0.0)
    one.scale(1, now=5.0)
    assert states(one) == [WorkerPhase.READY, WorkerPhase.DRAINING]
    assert one.facts().ending == 1

    assert one.advance(10.0, 10.0, None) == 0.0
    assert len(one.workers) == 2
    one.workers[1].streams.decode(1e6)
    assert one.advance(15.0, 10.0, None) == 0.0
    assert states(one) == [WorkerPhase.READY]


def test_a_worker_that_drains_is_taken_back():
    one = pool(2)
    one.workers[1].streams.add(5.0, 10.0, 100.0)
    one.scale(1, now=0.0)
    one.scale(2, now=5.0)

    assert states(one) == [WorkerPhase.READY, WorkerPhase.READY]
    assert one.workers[1].streams.number == 5.0


def test_a_time_limit_cuts_what_still_runs():
    one = pool(2)
    one.workers[1].streams.add(5.0, 10.0, 100.0)
    one.scale(1, now=0.0)

    assert one.advance(30.0, 10.0, 60.0) == 0.0
    assert one.advance(60.0, 10.0, 60.0) == 5.0
    assert len(one.workers) == 1


def test_prompts_are_served_in_order_at_the_speed_of_the_ready_workers():
    phase, pools = PrefillPhase(SPEEDS), [pool(1, "prefill"), pool(1, "prefill", speed=2.0)]
    # 2000 tokens, of which 1500 can be served
    done = phase.serve(TraceLoad(0.0, 4.0, 100.0, 5.0), pools, 5.0)

    assert [batch.number for batch in done] == [15.0]
    assert (phase.num_requests, phase.num_tokens, phase.engine_busy_ratio) == (5.0, 500.0, 1.0)
    assert phase.ttft_seconds == 1.0

    done = phase.serve(TraceLoad(5.0, 1.0, 200.0, 5.0), pools, 5.0)
    assert [(batch.number, batch.since) for batch in done] == [(5.0, 0.0), (5.0, 5.0)]
    assert (phase.num_requests, phase.engine_busy_ratio) == (0.0, 1.0)
    assert phase.ttft_seconds == pytest.approx((5.0 * 6.0 + 5.0 * 2.0) / 10.0)


def test_without_prefill_workers_prompts_wait():
    phase = PrefillPhase(SPEEDS)

    assert phase.serve(TraceLoad(0.0, 1.0, 100.0, 5.0), [], 5.0) == []
    assert (phase.num_requests, phase.engine_busy_ratio, phase.ttft_seconds) == (5.0, 0.0, None)


def test_streams_write_their_answers_in_the_mean_time_that_these_take():
    running = Streams()
    running.add(100.0, 50.0, 200.0)
    assert running.held_tokens == pytest.approx(100.0 * 50.0 + 100.0 * 25.0)

    written = [running.decode(10.0) for _ in range(400)]
    assert sum(written) == pytest.approx(100.0 * 200.0, rel=1e-6)
    assert running.is_done
    assert sum(written[:10]) > 0.9 * 100.0 * 100.0  # hardly one has ended after half its length


def test_streams_of_another_kind_are_joined_by_their_means():
    running = Streams()
    running.add(1.0, 100.0, 10.0)
    running.add(3.0, 200.0, 50.0)

    assert (running.number, running.input_tokens, running.output_tokens) == (4.0, 175.0, 40.0)


def test_streams_wait_for_room_in_the_kv_cache_and_for_a_place_in_the_batch():
    phase, pools = DecodePhase(SPEEDS, max_sequences=8), [pool(2)]
    phase.serve([PromptBatch(30.0, 200.0, 100.0, 0.0)], pools, 2.0)
    # (1000 tokens) / (200 + 100 / 2)
    assert phase.num_requests_waiting == pytest.approx(30.0 - 2 * 4.0)
    assert phase.usage(pools[0].workers[0]) > 0.8

    phase, pools = DecodePhase(SPEEDS, max_sequences=3), [pool(2)]
    phase.serve([PromptBatch(30.0, 200.0, 100.0, 0.0)], pools, 2.0)
    assert phase.num_requests_waiting == pytest.approx(24.0)


def test_no_request_is_lost_between_the_phases():
    phase, pools = DecodePhase(SPEEDS, max_sequences=8), [pool(2)]
    arrived = PromptBatch(30.0, 200.0, 100.0, 0.0)
    phase.serve([arrived], pools, 5.0)
    written = sum(phase.tokens.values())
    for _ in range(200):
        phase.serve([], pools, 5.0)
        written += sum(phase.tokens.values())

    assert phase.num_requests_waiting == 0.0
    assert written == pytest.approx(arrived.number * arrived.output_tokens, rel=1e-3)


def test_workers_that_drain_or_start_take_no_new_stream_and_the_former_go_on():
    one = pool(2)
    one.workers[1].streams.add(2.0, 100.0, 100.0)
    one.scale(1, now=0.0)
    one.scale(1, now=0.0)
    phase = DecodePhase(SPEEDS, max_sequences=8)
    phase.serve([PromptBatch(2.0, 100.0, 100.0, 0.0)], [one], 2.0)

    assert one.workers[0].streams.number > 1.9
    assert phase.tokens[id(one.workers[1])] > 0.0
    assert one.workers[1].streams.number <= 2.0


def test_a_request_longer_than_the_whole_cache_does_not_block_the_others_forever():
    phase, pools = DecodePhase(SPEEDS, max_sequences=8), [pool(1)]
    phase.serve(
        [PromptBatch(1.0, 5000.0, 100.0, 0.0), PromptBatch(1.0, 10.0, 10.0, 0.0)], pools, 5.0
    )
    for _ in range(200):
        phase.serve([], pools, 5.0)

    assert phase.num_requests_waiting == 0.0


def test_an_answer_of_one_token_needs_no_decode():
    phase, pools = DecodePhase(SPEEDS, max_sequences=8), [pool(1)]
    phase.serve([PromptBatch(1.0, 10.0, 1.0, 0.0)], pools, 5.0)

    assert (phase.num_requests_waiting, sum(phase.tokens.values())) == (0.0, 0.0)
