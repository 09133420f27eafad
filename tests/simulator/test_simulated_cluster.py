"""A cluster's requests: each ends once, its tokens and blocks add up, and a seed repeats it all."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_api.traces.requests import LoadTrace, TraceRequest
from pdcluster_simulator.cluster import ClusterBuilder
from pdcluster_simulator.events import SimulatedTime
from pdcluster_simulator.requests import RequestOutcome, SimulatedRequest, simulated_requests
from pdcluster_simulator.results import Gaps, Recorder, over_time, summarize
from pdcluster_simulator.run import PATIENCE_SECONDS, Options, simulate
from tests.simulator.small_clusters import (
    latencies,
    make_cluster,
    make_model,
    make_times,
    make_trace,
    run,
)

REMOTE = {"offload": {"prefillLengthThreshold": 0, "prefillQueueMax": 1000}}
ORCA = {"scheduler": "orca", "maxBatchedTokens": 512}
SHEDDING = {
    "admission": {"maxQueuedRequests": 4},
    "earlyRejection": {"enabled": True},
    "lowPriority": {"thresholdMilliseconds": 60},
}
LOCAL = {"offload": {"prefillLengthThreshold": 100_000, "decodeLoadThreshold": 100_000}}

SHED = ("waited_too_long", "displaced")
requests = st.builds(
    TraceRequest,
    st.floats(0.0, 3.0),
    st.integers(1, 200),
    st.integers(1, 60),
    st.sampled_from((0, 0, 100, -100)),
)
traces = st.lists(requests, min_size=1, max_size=40).map(
    lambda found: LoadTrace(sorted(found, key=lambda each: each.seconds))
)
clusters = st.sampled_from(
    (
        {"roles": {"prefill": 1, "decode": 1}, "routing": REMOTE},
        {"roles": {"prefill": 2, "decode": 2}, "routing": {"offload": {"policy": "measured"}}},
        {"roles": {"prefill": 1, "decode": 2, "router": 1}},
        {"roles": {"mixed": 2}, "engine": {"scheduler": "sarathi"}},
        {"roles": {"prefill": 1, "decode": 1}, "routing": REMOTE, "engine": ORCA},
        {"roles": {"prefill": 1, "decode": 1}, "routing": REMOTE, "qos": SHEDDING},
        {"roles": {"mixed": 1}, "qos": SHEDDING},
    )
)


@settings(max_examples=60, deadline=None)
@given(trace=traces, given_cluster=clusters)
def test_each_request_ends_once_and_all_adds_up(trace: LoadTrace, given_cluster: dict[str, Any]):
    model = make_model(trace, make_cluster(**given_cluster))
    time, recorder = SimulatedTime(), Recorder()
    builder = ClusterBuilder(model, time, recorder)
    cell = builder.start()
    seen: list[SimulatedRequest] = []

    def arrive(request: SimulatedRequest) -> None:
        seen.append(request)
        cell.arrive(request)

    for request in simulated_requests(trace, 16):
        time.at(request.arrival, arrive, request)
    for second in range(200):
        time.run(float(second))
        for worker in cell.workers.values():
            engine = worker.engine
            assert 0 <= engine.num_free_blocks <= engine.pool.num_available
            assert engine.pool.num_available <= engine.settings.num_blocks

    complete = [each for each in seen if each.outcome is RequestOutcome.COMPLETE]
    assert len(seen) == len(trace.requests) == len(recorder.end)
    assert not [each for each in seen if each.outcome is RequestOutcome.RUNNING]
    assert sum(recorder.outcomes.values()) == len(seen)
    for each in complete:
        assert each.arrival < each.first <= each.end
    made = sum(worker.engine.totals.output_tokens for worker in cell.workers.values())
    # A prompt may be shed while its first token is made.
    num_shed = sum(each in SHED for each in recorder.refusals.elements())
    assert 0 <= made - sum(each.output_tokens for each in complete) <= num_shed
    assert recorder.gaps.number == sum(each.output_tokens - 1 for each in complete)
    for worker in cell.workers.values():
        assert worker.engine.pool.num_available == worker.engine.settings.num_blocks
        assert worker.num_active == worker.num_decoding == worker.num_waiting == 0
        assert worker.ledger is None or worker.ledger.outstanding_tokens == 0


@settings(max_examples=15, deadline=None)
@given(trace=traces, given_cluster=clusters)
def test_a_seed_repeats_every_time(trace: LoadTrace, given_cluster: dict[str, Any]):
    first, again = (run(trace, make_cluster(**given_cluster)) for _ in range(2))

    assert latencies(first) == latencies(again)
    assert first.recorder.gaps.counts == again.recorder.gaps.counts


def test_a_local_prompt_takes_its_steps():
    # Chunks of 64 tokens: 64 and 36, each 10 ms and 0.1 ms a token, then nine decodes.
    result = run(make_trace((0.0, 100, 10)), make_cluster(routing=LOCAL))
    ttft = 0.01 + 64e-4 + 0.01 + 36e-4

    assert latencies(result) == [(pytest.approx(ttft), pytest.approx(ttft + 9 * 0.0101))]
    assert result.recorder.remote[0] == 0


def test_a_remote_prompt_waits_for_hops_and_for_its_kv():
    times = make_times(hop_seconds=0.002, transfer_seconds=0.001, request_seconds=0.003)
    result = run(make_trace((0.0, 60, 10)), make_cluster(routing=REMOTE), times)
    # Its request, the credit's answer is at once, the call, a step, and the token's way back.
    ttft = 0.003 + 0.002 + 0.016 + 0.002
    # KV of 60 tokens of 1000 bytes over 10 MB/s begins with the end of the step.
    arrived = 0.003 + 0.002 + 0.016 + 0.006 + 0.001 + 0.002

    assert result.recorder.remote[0] == 1
    assert latencies(result) == [(pytest.approx(ttft), pytest.approx(arrived + 9 * 0.0101))]


def test_a_prefill_worker_takes_prompts_one_batch_ahead():
    """Its credits are two steps of 64 tokens, so the third prompt waits at its decode worker."""
    trace = make_trace(*((0.0, 64, 2) for _ in range(3)))
    cluster = make_cluster(routing=REMOTE)
    ttft = sorted(first for first, _ in latencies(run(trace, cluster)))

    assert ttft == pytest.approx([0.0164, 0.0328, 0.0492])


def test_requests_that_wait_for_blocks_are_no_queue_of_the_prefill_workers():
    cluster = make_cluster(engine={"numBlocks": 8, "maxModelLen": 112}, routing=REMOTE)
    model = make_model(trace := make_trace(*((0.0, 80, 20) for _ in range(4))), cluster)
    time, recorder = SimulatedTime(), Recorder()
    cell = ClusterBuilder(model, time, recorder).start()
    for request in simulated_requests(trace, 16):
        cell.arrive(request)
    time.run(0.05)
    load = cell.workers["decode-x-0"].measured()

    # One decodes; each of the others has had a credit, and has given it back for want of blocks.
    assert (load.num_waiting, load.waiting_tokens) == (3, 240)
    assert load.credit_queue_requests == load.credit_queue_tokens == 0
    time.run(60.0)
    assert recorder.outcomes == {"complete": 4}


def test_preempted_requests_are_computed_again():
    cluster = make_cluster({"mixed": 1}, {"numBlocks": 8, "maxModelLen": 112})
    result = run(make_trace((0.0, 40, 60), (0.0, 40, 60)), cluster)

    assert result.recorder.num_preemptions > 0
    assert result.recorder.outcomes == {"complete": 2}


def test_a_prompt_that_no_engine_holds_is_refused():
    result = run(make_trace((0.0, 600, 2)))

    assert result.recorder.outcomes == {"refused": 1}
    [reason] = result.recorder.refusals
    assert "leave no room for output within max_model_len=512" in reason


def test_a_full_queue_refuses():
    cluster = make_cluster({"mixed": 1}, qos={"admission": {"maxQueuedRequests": 2}})
    result = run(make_trace(*((0.0, 64, 2) for _ in range(5))), cluster)

    assert result.recorder.outcomes == {"complete": 2, "refused": 3}
    assert result.recorder.refusals == {"queue_full": 3}


@pytest.mark.parametrize("routing", [LOCAL, REMOTE])
def test_low_priority_is_shed_and_displaced(routing: dict[str, Any]):
    rows = [TraceRequest(0.001 * n, 64, 2, 100) for n in range(5)]
    rows.append(TraceRequest(0.01, 64, 2, -100))
    cluster = make_cluster(qos=SHEDDING, routing=routing)
    recorder = run(LoadTrace(rows), cluster).recorder

    # Four of low priority fit, the last of them gives way, and what waits for 60 ms is shed.
    assert recorder.refusals["queue_full"] == 1
    assert recorder.refusals["displaced"] == 1
    assert recorder.outcomes["complete"] + recorder.refusals["waited_too_long"] == 4


def test_shared_prefixes_are_computed_once():
    rows = [TraceRequest(float(n), 64, 2, 0, (1, 2, 3, 4)) for n in range(3)]
    plain = LoadTrace([TraceRequest(each.seconds, 64, 2) for each in rows])
    cluster = make_cluster({"mixed": 1})
    shared, alone = (
        [first for first, _ in latencies(run(each, cluster))]
        for each in (LoadTrace(rows, block_tokens=16), plain)
    )

    assert alone == pytest.approx([0.0164] * 3)
    assert shared == pytest.approx([0.0164, 0.0116, 0.0116])  # all but the last block of 16


@pytest.mark.processes
def test_cells_take_requests_in_turn_and_are_put_together():
    trace = make_trace(*((0.1 * n, 50, 10) for n in range(30)))
    one = run(trace, num_cells=3)
    two = run(trace, num_cells=3, num_processes=2)

    assert one.recorder.outcomes == {"complete": 30}
    assert sorted(latencies(one)) == sorted(latencies(two))
    assert one.recorder.samples[0].ready == {"prefill/x": 3, "decode/x": 3}


def test_workers_follow_the_autoscaler():
    trace = make_trace(*((0.015 * n, 60, 4) for n in range(6000)))
    cluster = make_cluster(routing=REMOTE, autoscale={"mode": "On"})
    result = run(trace, cluster, autoscales=True, start_seconds=10.0)
    sizes = [sample.ready["prefill/x"] for sample in result.recorder.samples]

    assert sizes[0] == 1
    assert max(sizes) > 1
    assert any(each.record is not None for each in result.decisions)
    assert result.recorder.outcomes == {"complete": 6000}
    # Those that start count as workers, and not as idle ones.
    starting = next(
        each
        for each in result.recorder.samples
        if each.ready["prefill/x"] == 1 < each.replicas["prefill/x"]
    )
    assert starting.busy["prefill"] > 0.9
    # A worker is ready no sooner than it has started.
    first = next(each.seconds for each in result.decisions if each.record is not None)
    grown = next(each.seconds for each in result.recorder.samples if each.ready["prefill/x"] > 1)
    assert grown >= first + 10.0 - 5.0


def test_without_a_worker_requests_are_refused():
    trace = make_trace((0.0, 50, 10))
    model = make_model(trace, make_cluster({"prefill": 1, "decode": 1}))
    for pool in model.pools:
        assert pool.replicas == 1
    none = make_cluster({"prefill": 1, "decode": 0})
    result = simulate(make_model(trace, none), trace, Options(PATIENCE_SECONDS))

    assert result.recorder.refusals == {"no_worker": 1}


def test_figures_are_those_of_the_requests():
    result = run(make_trace(*((0.5 * n, 64, 11) for n in range(20))), make_cluster({"mixed": 1}))
    found = summarize(result.recorder, 1.0, 0.02)

    assert found.num_requests == 20
    assert found.good_ratio == 1.0
    assert found.ttft.mean == pytest.approx(0.0164)
    assert found.itl.mean == pytest.approx(0.0101)
    assert found.itl.p90 == pytest.approx(0.0101, rel=0.005)
    assert found.tpot.p90 == pytest.approx(0.0101)
    assert summarize(result.recorder, 0.01, None).goodput == 0.0
    moments = over_time(result.recorder, 5.0, 1.0, 0.02)
    assert [each.arrived for each in moments] == [2.0, 2.0]
    assert sum(each.good for each in moments) * 5.0 == pytest.approx(20)


def test_requests_that_have_not_ended_are_a_part_of_all():
    recorder = run(make_trace((0.0, 64, 11), (0.5, 64, 11)), make_cluster({"mixed": 1})).recorder
    recorder.num_arrived += 2
    found = summarize(recorder, 1.0, 0.02)
    assert found.good_ratio == 0.5
    assert found.outcomes == {"complete": 2, "unfinished": 2}


def test_cell_that_ends_first_stays_as_it_was():
    short, long = (
        run(make_trace((0.0, 64, 11), (last, 64, 11)), make_cluster({"mixed": 1})).recorder
        for last in (1.0, 30.0)
    )
    number = len(long.samples)
    assert number > len(short.samples)
    short.merge([long])
    assert len(short.samples) == number
    assert {sample.replicas["mixed/x"] for sample in short.samples} == {2}
    assert [sample.seconds for sample in short.samples] == [s.seconds for s in long.samples]
    short.merge([Recorder()])  # a cell without requests
    assert len(short.samples) == number


def test_preemptions_of_a_worker_that_is_gone_count():
    trace = make_trace((0.0, 64, 11))
    time, recorder = SimulatedTime(), Recorder()
    cell = ClusterBuilder(make_model(trace, make_cluster({"mixed": 1})), time, recorder).start()
    [worker] = cell.workers.values()
    worker.engine.scheduler.num_preemptions = 3
    cell.remove(worker)
    assert recorder.num_preemptions == 3


def test_percentiles_of_gaps_are_within_half_a_per_cent():
    gaps = Gaps()
    for number in range(1, 1001):
        gaps.add(number / 1000, 1)

    assert gaps.percentile(90) == pytest.approx(0.9, rel=0.006)
    assert gaps.mean == pytest.approx(0.5005)
    assert Gaps().percentile(50) is None
