"""Up at once, down after all of a window agreed, so far at a time, by the clock that
never jumps.
"""

import random
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.safety import stabilize
from pdcluster_api.plan.autoscale.values import DecisionTrace, Memory, PoolSample
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.workload import PoolKey
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    CALM,
    IDLE,
    NOON,
    NOW,
    D,
    P,
    agreed,
    facts_of,
    make_spec,
    pool,
    rules_of,
    run,
    see,
    step_of,
    windows_of,
)

FULL = replace(CALM, kv_cache_usage_ratio=0.9)


def test_a_role_grows_at_once_and_shrinks_after_its_window():
    spec = make_spec()

    assert see(spec, decode=FULL).decision.replicas[D] == 5
    assert agreed(spec, seconds=295.0, decode=IDLE).decision.replicas[D] == 4
    assert agreed(spec, seconds=300.0, decode=IDLE).decision.replicas[D] == 3


def test_the_wait_is_explained():
    outcome = agreed(make_spec(), seconds=100.0, decode=IDLE)

    step = step_of(outcome, rules.WINDOW, "decode")
    assert (step.before, step.after) == (1, 4)


def test_growth_can_be_made_to_wait_as_well():
    spec = make_spec(scaleUp={"windowSeconds": 60})

    assert see(spec, decode=FULL).decision.replicas[D] == 4
    assert agreed(spec, seconds=60.0, decode=FULL).decision.replicas[D] == 5


def test_steps_are_limited():
    spec = make_spec(decode=[pool(10)], scaleUp={"maxStep": 2}, scaleDown={"maxStep": 3})
    free = make_spec(decode=[pool(10)], scaleDown={"maxStep": 0})

    up = see(spec, decode=replace(CALM, num_requests_waiting=10.0))
    assert up.decision.replicas[D] == 12
    assert rules.MAX_STEP in rules_of(up, "decode")
    assert agreed(spec, decode=IDLE).decision.replicas[D] == 7
    assert agreed(free, decode=IDLE).decision.replicas[D] == 1


def test_one_other_recommendation_starts_the_wait_again():
    spec = make_spec()
    facts = facts_of(spec)
    memory = Memory()
    sizes = []
    for second in range(0, 700, 5):
        now = NOW + second
        worker = CALM if second == 200 else IDLE
        outcome = run(
            spec, facts, windows_of(facts, now=now, rounds=1, decode=worker), memory, now=now
        )
        memory = outcome.memory
        sizes.append((second, outcome.decision.replicas[D]))

    assert next(second for second, size in sizes if size < 4) == 505


def test_another_size_starts_the_wait_again():
    spec = make_spec()
    before, after = facts_of(spec), facts_of(spec, decode={"replicas": 3})
    memory = agreed(spec, before, decode=IDLE).memory
    now = NOW + 305

    assert (
        run(
            spec, before, windows_of(before, now=now, decode=IDLE), memory, now=now
        ).decision.replicas[D]
        == 3
    )
    assert (
        run(
            spec, after, windows_of(after, now=now, decode=IDLE), memory, now=now
        ).decision.replicas[D]
        == 3
    )


def test_advice_that_is_not_followed_stays_the_same():
    spec = make_spec()
    facts = facts_of(spec)
    memory = agreed(spec, decode=IDLE).memory

    for second in range(305, 900, 5):
        outcome = run(
            spec, facts, windows_of(facts, now=NOW + second, decode=IDLE), memory, now=NOW + second
        )
        memory = outcome.memory
        assert outcome.decision.replicas[D] == 3


@pytest.mark.parametrize(("gap", "size"), [(55.0, 3), (65.0, 4), (4000.0, 4)])
def test_recommendations_from_before_a_gap_do_not_count(gap: float, size: int):
    """A stalled operator, an API server that is away: two recommendations far apart are no
    agreement.
    """
    spec = make_spec()
    facts = facts_of(spec)
    memory = agreed(spec, decode=IDLE, seconds=295.0).memory
    now = NOW + 295.0 + gap

    assert (
        run(
            spec, facts, windows_of(facts, now=now, decode=IDLE), memory, now=now
        ).decision.replicas[D]
        == size
    )


@pytest.mark.parametrize("jump", [timedelta(days=-400), timedelta(hours=-1), timedelta(days=400)])
def test_a_wall_clock_that_jumps_changes_no_pace(jump: timedelta):
    spec = make_spec()
    facts = facts_of(spec)
    memory = run(spec, facts, windows_of(facts, decode=IDLE)).memory

    outcome = run(
        spec,
        facts,
        windows_of(facts, now=NOW + 5, decode=IDLE),
        memory,
        now=NOW + 5,
        wall=NOON + jump,
    )

    assert outcome.decision.replicas[D] == 4


def test_memory_of_another_clock_only_waits_longer():
    spec = make_spec()
    facts = facts_of(spec)
    memory = agreed(spec, decode=IDLE).memory
    memory = replace(memory, backoff={"H100": NOW + 10**9})

    outcome = run(spec, facts, windows_of(facts, now=3.0, rounds=1, decode=IDLE), memory, now=3.0)

    assert outcome.decision.replicas[D] == 4
    assert outcome.memory.backoff == {}


def test_the_most_careful_decision_of_the_window_counts():
    spec = AutoscaleSpec.model_validate(
        {"scaleDown": {"windowSeconds": 10, "maxStep": 0}, "scaleUp": {"windowSeconds": 10}}
    )

    assert (
        stabilize("decode", 9, 2, spec, past=((0.0, 3), (5.0, 6)), now=10.0, trace=DecisionTrace())[
            0
        ]
        == 6
    )
    assert (
        stabilize("decode", 1, 9, spec, past=((0.0, 8), (5.0, 4)), now=10.0, trace=DecisionTrace())[
            0
        ]
        == 4
    )


@pytest.mark.parametrize("window", [300, 3600])
def test_what_is_remembered_stays_small(window: int):
    spec = AutoscaleSpec.model_validate({"scaleDown": {"windowSeconds": window}})
    recommendations: tuple[tuple[float, int], ...] = ()
    for number in range(5000):
        recommendations = stabilize(
            "decode", 4, 3, spec, past=recommendations, now=number * 5.0, trace=DecisionTrace()
        )[1]
        assert len(recommendations) == 1
    for number in range(5000, 9000):
        recommendations = stabilize(
            "decode",
            4,
            number % 4,
            spec,
            past=recommendations,
            now=number * 5.0,
            trace=DecisionTrace(),
        )[1]
        assert len(recommendations) <= 62


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(1.0, 40.0), st.integers(0, 8)), min_size=1, max_size=60),
    st.sampled_from([0, 10, 100]),
)
def test_what_is_remembered_lets_through_no_more_than_all_recommendations_of_the_window(
    given: list[tuple[float, int]], window: int
):
    """Against the rule on the whole history: all went one way for the window, and none went less
    far.
    """
    rule = {"windowSeconds": window, "maxStep": 0}
    spec = AutoscaleSpec.model_validate({"scaleDown": rule, "scaleUp": rule})
    asked, now, recommendations, history = 4, 0.0, (), []
    for gap, recommended in given:
        now += gap
        history.append((now, recommended))
        workers, recommendations = stabilize(
            "decode", asked, recommended, spec, past=recommendations, now=now, trace=DecisionTrace()
        )
        recent = [(at, each) for at, each in history if at > now - window]
        before = [each for at, each in history if at <= now - window][-1:]
        whole = [*before, *(each for _, each in recent)]
        is_full = bool(before) or window == 0
        same_way = all((each > asked) == (recommended > asked) and each != asked for each in whole)
        if workers != asked:
            assert is_full
            assert same_way
            assert abs(workers - asked) <= min(abs(each - asked) for each in whole)
        elif is_full and same_way:
            assert recommended == asked


@pytest.mark.parametrize("window", [0, 60, 300])
def test_a_full_role_grows_in_time_although_its_queue_goes_up_and_down(window: int):
    """In many rounds it falls by chance, and so fast that it would soon be under its threshold."""
    spec = make_spec(scaleUp={"windowSeconds": window})
    facts, noise, memory, held = facts_of(spec), random.Random(2), Memory(), 0
    rounds: dict[PoolKey, list[PoolSample]] = {P: [], D: []}
    for number in range((window + 120) // 5):
        now = NOW + 5.0 * number
        full = replace(
            IDLE, engine_busy_ratio=1.0, prefill_queue_requests=max(0.0, noise.gauss(14.0, 2.5)) / 4
        )
        for key, samples in windows_of(facts, now=now, rounds=1, prefill=full).items():
            rounds[key].extend(samples)
        outcome = run(spec, facts, rounds, memory, now=now)
        memory = outcome.memory
        held += any(
            "it falls by" in step.why and step.rule == rules.NEED for step in outcome.decision.steps
        )
        if outcome.decision.replicas[P] > 4:
            break
    else:
        raise AssertionError(f"it never grew; held in {held} rounds")
    assert window == 0 or held


def test_an_agreement_to_shrink_does_not_outlast_a_backlog_that_is_worked_off():
    spec = AutoscaleSpec.model_validate({})

    up = stabilize(
        "decode", 4, 4, spec, past=((0.0, 6),), now=10.0, trace=DecisionTrace(), goes_on=True
    )
    down = stabilize(
        "decode", 4, 4, spec, past=((0.0, 3),), now=10.0, trace=DecisionTrace(), goes_on=True
    )
    other = stabilize("decode", 4, 4, spec, past=((0.0, 6),), now=10.0, trace=DecisionTrace())

    assert up == (4, ((0.0, 6),))
    assert (down[1], other[1]) == ((), ())


def test_advice_does_not_go_up_and_down_with_a_load_that_stays_the_same():
    """In mode Advise each decision begins from the same size; with mode On the first growth would
    end this.
    """
    spec = make_spec(prefill=[pool(8)], mode="Advise")
    facts, noise, memory = facts_of(spec), random.Random(1), Memory()
    rounds: dict[PoolKey, list[PoolSample]] = {P: [], D: []}
    advice = []
    for number in range(240):
        now = NOW + 5.0 * number
        busy = {f"prefill-x-{ordinal}": noise.uniform(0.86, 0.94) for ordinal in range(8)}
        for key, (sample,) in windows_of(facts, now=now, rounds=1).items():
            workers = tuple(
                replace(each, engine_busy_ratio=busy.get(each.pod, each.engine_busy_ratio))
                for each in sample.workers
            )
            rounds[key].append(PoolSample(now, workers))
        outcome = run(spec, facts, rounds, memory, now=now)
        memory = outcome.memory
        advice.append(outcome.decision.replicas[P])

    assert advice[-1] == 10
    assert sum(before != after for before, after in pairwise(advice)) <= 2
    assert len(memory.advised["prefill"]) <= 2


def test_smaller_advice_counts_after_the_down_window():
    spec = make_spec(mode="Advise", scaleDown={"windowSeconds": 100})
    facts = facts_of(spec)
    memory = run(spec, facts, windows_of(facts, decode=FULL)).memory
    advice = {}
    for seconds in range(5, 126, 5):
        outcome = run(spec, facts, windows_of(facts, now=NOW + seconds), memory, now=NOW + seconds)
        memory, advice[seconds] = outcome.memory, outcome.decision.replicas[D]

    assert (advice[5], advice[95], advice[100], advice[125]) == (5, 5, 4, 4)
