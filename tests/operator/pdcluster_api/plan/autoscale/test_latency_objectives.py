"""Objectives by percentile: growth over them, and no worker taken away that would break them."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.histogram import LatencyHistogram
from pdcluster_api.plan.autoscale.latency import Correction, MeasuredLatency, learned
from pdcluster_api.plan.autoscale.values import PoolSample
from pdcluster_schema.autoscale import LatencyObjectiveSpec
from pdcluster_schema.pdcluster import PDClusterSpec
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    CALM,
    IDLE,
    NOW,
    D,
    M,
    P,
    agreed,
    facts_of,
    make_spec,
    observed,
    pool,
    run,
    see,
    step_of,
    windows_of,
)

# a tail: the mean is 0.16 s, and 6 of 40 requests take 0.75 s
TAIL = observed((34, 0.06), (6, 0.75))


def by_percentile(
    percentile: int | None, seconds: float = 0.5, kind: str = "ttft"
) -> PDClusterSpec:
    target = {"seconds": seconds} | ({} if percentile is None else {"percentile": percentile})
    return make_spec(objective={kind: target})


def inputs_of(outcome, role: str) -> dict[str, float | None]:
    return {each.name: each.value for each in outcome.decision.inputs if each.subject == role}


def test_prefill_grows_by_its_percentile_while_the_mean_holds():
    latencies = {"decode": {"ttft": TAIL}}

    by_mean = see(by_percentile(None), latencies=latencies)
    by_tail = see(by_percentile(90), latencies=latencies)

    assert (by_mean.decision.replicas[P], by_tail.decision.replicas[P]) == (4, 5)
    found = inputs_of(by_tail, "prefill")
    assert found["time_to_first_token_seconds_samples"] == 160  # of four rounds
    # rank 144 of 160: a third into the bucket from 0.5 to 0.75, which has 24
    assert found["time_to_first_token_seconds_p90"] == pytest.approx(0.5 + 0.25 * 8 / 24, abs=1e-4)
    assert found["time_to_first_token_seconds_p50"] < 0.06
    assert "p90 0.583 over 0.5" in step_of(by_tail, rules.NEED, "prefill").why


def test_decode_grows_by_its_percentile():
    latencies = {"decode": {"itl": observed((90, 0.02), (10, 0.2))}}
    outcome = see(by_percentile(95, 0.1, "itl"), latencies=latencies)

    assert outcome.decision.replicas == {P: 4, D: 7}  # the p95 is 0.175, halfway into a bucket


def test_mixed_workers_hold_both():
    spec = make_spec(
        mixed=[pool(4)],
        objective={"ttft": {"seconds": 0.5, "percentile": 90}, "itl": {"seconds": 0.1}},
    )
    late = {"mixed": {"ttft": TAIL, "itl": observed((100, 0.02))}}
    slow = {"mixed": {"ttft": observed((40, 0.06)), "itl": observed((100, 0.2))}}

    assert see(spec, latencies=late).decision.replicas[M] == 5
    assert see(spec, latencies=slow).decision.replicas[M] == 8


@pytest.mark.parametrize("number", [1, 12])
def test_too_few_samples_hold_the_role(number: int):
    latencies = {"decode": {"ttft": observed((number, 0.01))}}
    outcome = agreed(by_percentile(90), prefill=IDLE, latencies=latencies)

    assert outcome.decision.replicas[P] == 4
    why = f"p90 has {4 * number} of 50 samples: none is taken away"
    assert why in step_of(outcome, rules.METRICS, "prefill").why


def test_samples_in_no_common_buckets_hold_the_role():
    latencies = {"decode": {"ttft": LatencyHistogram((inf,), (30.0,), 0.3)}}
    outcome = agreed(by_percentile(90), prefill=IDLE, latencies=latencies)

    assert outcome.decision.replicas[P] == 4
    why = "p90 has 120 samples, of workers whose buckets have no bound in common: none is taken"
    assert why in step_of(outcome, rules.METRICS, "prefill").why


def test_too_few_samples_ask_for_no_worker_either():
    late = {"decode": {"ttft": observed((1, 9.0))}}

    assert see(by_percentile(90), latencies=late).decision.replicas[P] == 4


def test_a_role_without_any_request_shrinks():
    """No client waits: only its other signals speak."""
    latencies = {"decode": {"ttft": observed()}}

    assert agreed(by_percentile(90), prefill=IDLE, latencies=latencies).decision.replicas[P] == 3


def test_samples_of_the_same_workers_are_taken_from_further_back():
    """Fresh rounds have 20 samples; together with those before, as long as no worker came, 60."""
    spec, facts = by_percentile(90), facts_of(by_percentile(90))
    late = {"decode": {"ttft": observed((5, 0.75))}}
    windows = windows_of(facts, rounds=12, latencies=late)

    assert run(spec, facts, windows).decision.replicas[P] == 6

    before = windows[P][0].workers[:3]
    windows[P] = [replace(each, workers=before) for each in windows[P][:6]] + windows[P][6:]
    outcome = run(spec, facts, windows)
    assert inputs_of(outcome, "prefill")["time_to_first_token_seconds_samples"] == 30
    assert outcome.decision.replicas[P] == 4


def test_late_samples_ask_for_no_worker_after_the_last_request():
    """Without a request in the fresh rounds, those of a load that has ended do not count."""
    spec, facts = by_percentile(90), facts_of(by_percentile(90))
    windows = windows_of(facts, rounds=12, latencies={"decode": {"ttft": observed((20, 0.75))}})
    ended = {"ttft": observed()}
    windows[D] = windows[D][:6] + [replace(each, latencies=ended) for each in windows[D][6:]]

    outcome = run(spec, facts, windows)

    assert outcome.decision.replicas[P] == 4
    assert inputs_of(outcome, "prefill")["time_to_first_token_seconds_samples"] == 0


@pytest.mark.parametrize(
    ("seconds", "waited", "workers"),
    [
        (0.3, 0.0, 3),  # none of it is in a queue
        (
            0.3,
            0.3,
            4,
        ),  # all is: at 0.39 instead of 0.3 of use it would be 0.3 x 4/3 x 0.7/0.6 = 0.47
        (0.2, 0.2, 3),
    ],
)
def test_a_worker_goes_only_while_the_percentile_is_expected_to_hold(
    seconds: float, waited: float, workers: int
):
    spec = by_percentile(50, 0.45)
    latencies = {
        "decode": {
            "ttft": exactly(seconds, 40),
            "queue": exactly(waited, 40) if waited else observed((40, 0.0)),
        }
    }
    busy = replace(IDLE, engine_busy_ratio=0.3)

    outcome = agreed(spec, prefill=busy, latencies=latencies)

    assert outcome.decision.replicas[P] == workers
    if workers == 4:
        why = step_of(outcome, rules.SAFETY, "prefill").why
        assert (
            "p50 0.3, 0.3 of it in the queue, with 3 of 4 workers: 0.467 expected, over 0.45" in why
        )


def exactly(seconds: float, number: int):
    """So many requests whose p50 is that: the middle between it less and more."""
    return observed((number / 2, seconds), (number / 2, 2 * seconds))


def test_a_queue_that_is_not_measured_is_all_of_the_latency():
    """A stock engine times prompts only that wait for no other."""
    busy = replace(IDLE, engine_busy_ratio=0.3)
    some = {"ttft": exactly(0.3, 40), "queue": observed((20, 0.0))}

    outcome = agreed(by_percentile(50, 0.45), prefill=busy, latencies={"decode": some})

    assert outcome.decision.replicas[P] == 4


def test_queue_objective_goes_by_the_part_that_waits():
    latencies = {"decode": {"ttft": observed((40, 0.3)), "queue": observed((40, 0.3))}}

    assert see(by_percentile(90, 0.2, "queue"), latencies=latencies).decision.replicas[P] == 6


LATENCIES = st.builds(
    MeasuredLatency,
    st.sampled_from(["ttft", "itl", "queue"]),
    st.just(LatencyObjectiveSpec(seconds=0.5, percentile=90)),
    st.floats(0.001, 50.0).map(lambda seconds: observed((1000, seconds))),
    utilization=st.floats(0.0, 1.0),
    factor=st.floats(1.0 / rules.CORRECTION_LIMIT, rules.CORRECTION_LIMIT),
).flatmap(
    lambda latency: st.floats(0.0, 1.0).map(
        lambda share: replace(latency, queue=share * (latency.seconds or 0.0))
    )
)


@given(LATENCIES, st.integers(2, 200))
def test_fewer_workers_are_never_expected_to_be_faster(latency: MeasuredLatency, workers: int):
    expected = [latency.predicted(workers / stay) for stay in range(workers, 0, -1)]

    assert expected[0] == pytest.approx(latency.seconds)
    assert all(one <= other * (1 + 1e-9) for one, other in pairwise(expected))


@given(LATENCIES, st.floats(1.0, 8.0))
def test_more_use_or_more_queue_is_never_expected_to_be_better(
    latency: MeasuredLatency, load: float
):
    busier = replace(latency, utilization=(1.0 + latency.utilization) / 2.0)
    queued = replace(latency, kind="ttft", queue=latency.seconds or 0.0)

    assert busier.predicted(load) >= latency.predicted(load) * (1 - 1e-9)
    if latency.kind != "itl":
        assert queued.predicted(load) >= latency.predicted(load) * (1 - 1e-9)


def test_no_queue_holds_at_full_use():
    full = MeasuredLatency(
        "ttft", LatencyObjectiveSpec(seconds=1), observed((9, 0.5)), queue=0.1, utilization=0.8
    )

    assert full.predicted(1.25) == inf
    assert replace(full, queue=0.0).predicted(1.25) == pytest.approx(0.5)


def test_a_prediction_is_corrected_by_what_came_of_it():
    """At 4 workers 0.4 s with a use of 0.3; at 3 it should be 0.4 x 4/3 x 0.7/0.6 = 0.62."""
    target = LatencyObjectiveSpec(seconds=1.0)
    before = MeasuredLatency("ttft", target, observed((9, 0.4)), queue=0.4, utilization=0.3)
    past = learned(None, before, workers=4, num_settled=4)
    assert past == Correction(4, before)
    after = replace(before, observed=observed((9, 0.8)), queue=0.8, utilization=0.4)

    assert learned(past, after, workers=3, num_settled=2) == past  # one has not had its part yet
    found = learned(past, after, workers=3, num_settled=3)

    measured = 0.8 / (0.4 * 4 / 3 * 0.7 / 0.6)
    assert found is not None
    assert found.factor == pytest.approx((1.0 + measured) / 2)
    assert found.workers == 3
    # less load per worker, or another objective, teaches nothing
    eased = replace(after, utilization=0.2)
    assert getattr(learned(found, eased, 4, 4), "factor", None) == found.factor
    other = replace(after, objective=LatencyObjectiveSpec(seconds=2.0))
    assert learned(found, other, 3, 3) == Correction(3, other)
    assert learned(found, replace(after, observed=observed()), 3, 3) == found


@pytest.mark.parametrize(
    ("ratios", "factor"),
    [([1.2] * 12, 1.2), ([2.0, *[1.0] * 12], 1.0), ([0.5, *[1.0] * 12], 1.0)],
)
def test_a_correction_comes_to_what_every_change_measured(ratios: list[float], factor: float):
    """ratios: measured over the formula, at each of several changes in a row."""
    target = LatencyObjectiveSpec(seconds=1.0)
    latency = MeasuredLatency("itl", target, observed((9, 0.01)), utilization=0.1)
    workers, past = 20, learned(None, latency, 20, 20)
    for ratio in ratios:
        workers, seconds = workers - 1, latency.predicted(1.1) * ratio
        more = 1.1 * latency.utilization
        latency = replace(latency, observed=observed((9, seconds)), utilization=more)
        past = learned(past, latency, workers, workers)

    assert past is not None
    assert past.factor == pytest.approx(factor, abs=0.01)


@given(st.floats(0.001, 60.0), st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_a_correction_stays_within_its_limit(seconds: float, used: float, then: float):
    target = LatencyObjectiveSpec(seconds=1.0)
    before = MeasuredLatency("ttft", target, observed((9, 0.4)), queue=0.2, utilization=then)
    after = replace(before, observed=observed((9, seconds)), utilization=used)

    found = learned(Correction(4, before, 1.7), after, 3, 3)

    assert found is not None
    assert 1.0 / rules.CORRECTION_LIMIT <= found.factor <= rules.CORRECTION_LIMIT


def test_the_correction_is_remembered_and_shown():
    spec = by_percentile(None, 5.0)
    four, three = facts_of(spec), facts_of(spec, prefill={"replicas": 3})
    busy = replace(CALM, engine_busy_ratio=0.45)
    first = run(
        spec,
        four,
        windows_of(four, prefill=busy, latencies={"decode": {"ttft": observed((40, 0.2))}}),
    )
    latencies = {"decode": {"ttft": observed((40, 0.5))}}
    busier = replace(CALM, engine_busy_ratio=0.6)

    second = run(spec, three, windows_of(three, prefill=busier, latencies=latencies), first.memory)

    ratio = inputs_of(second, "prefill")["time_to_first_token_seconds_correction_ratio"]
    expected = 0.2 * (0.6 / 0.45) * 0.55 / 0.4
    assert ratio == pytest.approx((1.0 + 0.5 / expected) / 2, abs=1e-3)


def test_a_worker_that_is_gone_leaves_its_samples():
    """Buckets are kept by pool: what clients saw stays true."""
    spec = by_percentile(90)
    facts = facts_of(spec)
    sample = PoolSample(NOW, (), ("d",), {"ttft": observed((60, 0.75))})
    windows = {**windows_of(facts), D: [sample]}

    assert (
        inputs_of(run(spec, facts, windows), "prefill")["time_to_first_token_seconds_samples"] == 60
    )
