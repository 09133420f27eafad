"""A decision stands whatever the facts, the windows and the memory hold, and gives
the same again.
"""

import math
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdcluster_api.plan.autoscale.histogram import LatencyHistogram
from pdcluster_api.plan.autoscale.values import Memory, Outcome, PoolFacts, PoolSample, WorkerSample
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    CALM,
    NOON,
    NOW,
    D,
    P,
    agreed,
    facts_of,
    make_spec,
    pool,
    reasons,
    run,
    see,
    windows_of,
)

COUNTS = st.integers(0, 12)
NUMBERS = st.one_of(
    st.floats(0.0, 2.0), st.sampled_from([math.nan, math.inf, -1.0, 1e300, 1e11, 1e-300])
)
MAYBE = st.one_of(st.none(), NUMBERS)
TIMES = st.floats(NOW - 700.0, NOW + 20.0)


def facts(role: str, name: str) -> st.SearchStrategy[PoolFacts]:
    return st.builds(
        PoolFacts,
        role=st.just(role),
        pool=st.just(name),
        gpu=st.sampled_from(["H100", "B200", "own"]),
        replicas=COUNTS,
        current=COUNTS,
        ready=COUNTS,
        ending=COUNTS,
        unschedulable=COUNTS,
        unschedulable_top=COUNTS,
        unready_top=COUNTS,
        unschedulable_seconds=st.floats(0.0, 1000.0),
        fault=st.sampled_from([None, "quota"]),
    )


WORKERS = st.builds(WorkerSample, st.sampled_from("abc"), *[NUMBERS] * 6, *[MAYBE] * 5)
OBSERVATIONS = st.lists(st.tuples(st.floats(0.0, 1e9), st.floats(0.0, 1e6)), max_size=5)
LATENCIES = st.dictionaries(
    st.sampled_from(["ttft", "itl", "queue"]),
    st.builds(LatencyHistogram.of, st.sampled_from([(), (0.1, 1.0), (0.2, 1.0)]), OBSERVATIONS),
)
SAMPLES = st.builds(
    PoolSample,
    TIMES,
    st.lists(WORKERS, max_size=3).map(tuple),
    st.sampled_from([(), ("d",)]),
    LATENCIES,
)
WINDOW = st.lists(SAMPLES, max_size=4).map(
    lambda found: sorted(found, key=lambda sample: sample.at)
)
RECOMMENDATIONS = st.lists(st.tuples(TIMES, COUNTS), max_size=4).map(
    lambda found: tuple(sorted(found))
)
MEMORIES = st.builds(
    Memory,
    recommendations=st.dictionaries(
        st.sampled_from(["prefill", "decode", "mixed"]), RECOMMENDATIONS
    ),
    sizes=st.dictionaries(st.sampled_from(["prefill", "decode"]), COUNTS),
    backoff=st.dictionaries(st.sampled_from(["H100", "gone"]), TIMES),
)
EVERY = st.tuples(facts("prefill", "x"), facts("decode", "x"), facts("decode", "old"))
SPEC = make_spec(
    prefill=[pool(4, minReplicas=1, maxReplicas=9)],
    decode=[pool(4, minReplicas=1, maxReplicas=9)],
    ratio={"min": 0.5, "max": 1.5},
    budget={"total": 14},
    lines={
        "prefill": {"backlogUpSeconds": 1.0, "headroom": 0.2},
        "objective": {
            "ttft": {"seconds": 0.5, "percentile": 90},
            "queue": {"seconds": 0.1, "percentile": 50},
            "itl": {"seconds": 0.05},
        },
    },
)
NONE_BUT_PODS_THAT_HOLD_THE_BUDGET = (
    PoolFacts("prefill", "x", "H100", replicas=0, current=0, ready=0),
    PoolFacts("decode", "x", "H100", replicas=0, current=10, ready=0),
    PoolFacts("decode", "old", "H100", replicas=0, current=4, ready=0),
)


@settings(max_examples=100, deadline=None)
@example(NONE_BUT_PODS_THAT_HOLD_THE_BUDGET, {}, Memory())
@given(EVERY, st.dictionaries(st.sampled_from([P, D]), WINDOW), MEMORIES)
def test_nothing_that_is_read_breaks_a_decision(
    found: tuple[PoolFacts, ...], windows: dict[tuple[str, str], list[PoolSample]], memory: Memory
):
    outcome = run(SPEC, found, windows, memory)

    assert outcome.decision.replicas.keys() == {P, D}
    for each in found[:2]:
        assert outcome.decision.replicas[each.key] >= 1 or waits_for_its_first(each, outcome)
    said = [
        *(step.why for step in outcome.decision.steps),
        *(problem.message for problem in outcome.decision.problems),
    ]
    if not any("waits until another is ready" in each for each in said):
        assert max(outcome.decision.replicas.values()) <= 9
        assert sum(outcome.decision.replicas.values()) <= 14
    assert all(each.value is None or math.isfinite(each.value) for each in outcome.decision.inputs)
    assert run(SPEC, found, windows, memory) == outcome


def waits_for_its_first(facts: PoolFacts, outcome: Outcome) -> bool:
    """Return whether a role that had no worker gets none because pods still hold the budget."""
    is_said = any(
        step.subject == "/".join(facts.key) and "it waits for room" in step.why
        for step in outcome.decision.steps
    )
    return facts.replicas == 0 and is_said and "BudgetTooSmall" in reasons(outcome)


def test_a_pool_without_facts_counts_as_declared():
    spec = make_spec(decode=[pool(4), pool(2, "new")])
    found = facts_of(spec)[:2]

    assert see(spec, found).decision.replicas == {P: 4, D: 4, ("decode", "new"): 2}


def test_an_operator_that_restarts_in_the_middle_goes_on_from_the_record():
    spec = make_spec()
    recorded = facts_of(spec, decode={"replicas": 6, "current": 4, "ready": 4})
    windows = windows_of(recorded, decode=replace(CALM, kv_cache_usage_ratio=0.9))

    assert run(spec, recorded, windows, Memory()).decision.replicas[D] == 6


def test_the_mode_does_not_change_a_decision():
    found = [
        see(make_spec(mode=mode), decode=replace(CALM, kv_cache_usage_ratio=0.9)).decision
        for mode in ("Off", "Advise", "On")
    ]

    assert found[0] == found[1] == found[2]


def test_a_calm_cluster_has_nothing_to_say():
    outcome = agreed(make_spec(ratio={"min": 0.5, "max": 2.0}, budget={"total": 8}))

    assert (outcome.changed, outcome.decision.steps, outcome.decision.problems) == (False, (), ())
    assert {each.name for each in outcome.decision.inputs} == {
        "prefill_queue_requests",
        "engine_busy_ratio",
        "num_requests_waiting",
        "kv_cache_usage_ratio",
        "ready_workers",
        "settled_workers",
    }


def test_only_schedules_read_the_wall_clock():
    spec = make_spec()
    found = facts_of(spec)

    other = run(spec, found, windows_of(found), wall=NOON.replace(year=1999))
    assert run(spec, found, windows_of(found)) == replace(
        other, decision=replace(other.decision, at=NOON)
    )
