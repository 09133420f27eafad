"""Intervals of a steady load are repeated: the figures are about those of all intervals."""

from collections.abc import Sequence
from typing import Any

import pytest

from pdcluster_api.traces.loads import LoadInterval, drawn_requests
from pdcluster_simulator.results import summarize
from pdcluster_simulator.run import Options as RunOptions
from pdcluster_simulator.run import Result, simulate
from tests.simulator.small_clusters import make_cluster, make_model

RATES = (6.0, 21.0, 3.0, 3.0)
SECONDS = 150.0  # of each


def replayed(rates: Sequence[float] = RATES, *, repeats: bool, **autoscale: Any) -> Result:
    times = [SECONDS * number for number in range(len(rates) + 1)]
    trace = drawn_requests(
        [
            LoadInterval(begin, rate, 200.0, 4.0, end)
            for begin, end, rate in zip(times, times[1:], rates, strict=False)
        ],
        "steady",
    )
    cluster = make_cluster(
        engine={"numBlocks": 400, "maxModelLen": 512},
        routing={"offload": {"prefillLengthThreshold": 0, "prefillQueueMax": 1000}},
        autoscale={"mode": "On", "scaleDown": {"windowSeconds": 60}, **autoscale},
    )
    options = RunOptions(5.0, autoscales=True, repeats=repeats, start_seconds=20.0)
    return simulate(make_model(trace, cluster), trace, options)


def test_what_is_repeated_is_about_what_is_simulated():
    every, some = replayed(repeats=False), replayed(repeats=True)
    seconds = SECONDS * len(RATES)

    assert every.recorder.repeated == 0.0
    assert some.recorder.repeated > 0.3 * seconds
    for result in (every, some):
        samples = result.recorder.samples
        assert [each.seconds for each in samples] == [5.0 * n for n in range(len(samples))]
        assert [each.seconds for each in result.decisions] == [
            5.0 * n for n in range(1, len(samples) + 1)
        ]
        assert result.recorder.outcomes == {"complete": result.recorder.num_arrived}
        assert max(result.recorder.end) == pytest.approx(seconds, abs=10.0)
    full, short = (summarize(each.recorder, 1.0, None) for each in (every, some))
    assert short.num_requests == pytest.approx(full.num_requests, rel=0.1)
    assert short.ttft.p50 == pytest.approx(full.ttft.p50, rel=0.1)
    assert short.itl.mean == pytest.approx(full.itl.mean, rel=0.05)
    assert short.accelerator_hours["H100"] == pytest.approx(
        full.accelerator_hours["H100"], rel=0.15
    )
    sizes = [each.replicas["prefill/x"] for each in some.recorder.samples]
    assert sizes[0] < max(sizes) > sizes[-1]


def test_a_growing_queue_and_workers_that_start_are_not_repeated():
    """25 requests a second are too many for the one worker that there may be."""
    few = replayed((6.0, 25.0), repeats=True, budget={"total": 2})
    burst = [each for each in few.recorder.samples if 150.0 <= each.seconds < 300.0]
    queued = [sum(each.queued.values()) for each in burst]

    assert queued[:18] == sorted(queued[:18])
    assert queued[18] > 900


@pytest.mark.parametrize("rate", [0.0, 0.02])
def test_requests_after_a_repeated_quiet_load_arrive_in_their_time(rate):
    result = replayed((6.0, rate, 6.0), repeats=True)
    recorder = result.recorder
    late = [at for at in recorder.arrivals if at >= 2 * SECONDS]

    assert recorder.repeated > 0.3 * SECONDS
    assert len(late) == pytest.approx(6.0 * SECONDS, rel=0.2)
    assert max(late) < 3 * SECONDS
    assert max(recorder.ttft) < 5.0
    assert max(recorder.end) < 3 * SECONDS + 10.0
