"""Limits of a recommendation: N/(N-1), workers on their way, the tolerance, and missing numbers."""

from dataclasses import replace

import pytest

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.safety import RoleState, recommend, safe_workers
from pdcluster_api.plan.autoscale.signals import Signal
from pdcluster_api.plan.autoscale.values import PoolSample
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    CALM,
    IDLE,
    NOW,
    D,
    P,
    agreed,
    facts_of,
    make_spec,
    reasons,
    rules_of,
    run,
    samples_of,
    see,
    step_of,
    windows_of,
)


def share(value: float, peak: float, up: float = 1.0, down: float = 0.6) -> Signal:
    return Signal("kv", value, up, down, value, "", peak, is_load=True)


@pytest.mark.parametrize(
    ("workers", "peak", "up", "stay"),
    [
        (3, 0.59, 1.0, 2),  # 0.59 * 3/2 = 0.885 is under the threshold
        (2, 0.55, 1.0, 2),  # 0.55 * 2/1 = 1.1 is not
        (2, 0.50, 1.0, 2),  # 1.0 is not under 1.0
        (2, 0.49, 1.0, 1),
        (10, 0.35, 0.4, 9),  # the latency preset: 0.35 * 10/9 = 0.389 is under 0.4
        (10, 0.37, 0.4, 10),  # 0.411 is not
        (4, 0.0, 1.0, 1),
    ],
)
def test_the_busiest_worker_stays_under_its_line_with_one_worker_less(
    workers: int, peak: float, up: float, stay: int
):
    """[Y18]: down only if max * N/(N-1) stays under the scale-up threshold."""
    found = safe_workers(share(peak, peak, up), workers)

    assert found == stay
    assert (peak * workers / (workers - 1) < up) == (found < workers)


def test_one_busy_worker_keeps_a_role_that_is_idle_on_average():
    spec = make_spec(lines={"decode": {"kvUsageUp": 0.75}})
    facts = facts_of(spec)
    windows = windows_of(facts, decode=IDLE)
    for sample in list(windows[D]):
        hot = (replace(sample.workers[0], kv_cache_usage_ratio=0.7), *sample.workers[1:])
        windows[D][windows[D].index(sample)] = replace(sample, workers=hot)

    outcome = run(spec, facts, windows)

    assert outcome.decision.replicas[D] == 4
    assert step_of(outcome, rules.SAFETY, "decode").after == 4  # 0.7 x 4 / 3 is not under 0.75


def test_of_workers_that_are_taken_away_as_many_as_can_be_are_thought_ready():
    role = RoleState("decode", requested=5, ready=3, signals=[share(0.1, 0.1)], workers=3)

    recommended = recommend(role, 0.1)

    # of the five two are not ready: any two that go may be of the three
    assert recommended.workers == 3


def test_a_pod_that_no_node_takes_never_blocks_a_step_down():
    spec = make_spec(lines={"decode": {"kvUsageUp": 0.75}})
    facts = facts_of(
        spec,
        decode={
            "replicas": 4,
            "ready": 3,
            "unschedulable": 1,
            "unschedulable_top": 1,
            "unschedulable_seconds": 20.0,
        },
    )

    outcome = agreed(spec, facts, decode=replace(IDLE, kv_cache_usage_ratio=0.26))

    assert outcome.decision.replicas[D] == 3  # without the waiting pod; three ready workers stay


def test_a_need_counts_once_while_its_workers_start():
    spec = make_spec()
    facts = facts_of(spec, decode={"replicas": 6, "ready": 4})

    # 4 * 0.95 / 0.75 = 5.1
    outcome = see(spec, facts, decode=replace(CALM, kv_cache_usage_ratio=0.95))

    assert outcome.decision.replicas[D] == 6
    assert rules_of(outcome, "decode") == [rules.PENDING]
    # more than what is on its way
    assert (
        see(spec, facts, decode=replace(CALM, num_requests_waiting=20.0)).decision.replicas[D] == 8
    )


def test_a_queue_is_not_laid_on_workers_that_came_a_moment_ago():
    spec = make_spec()
    facts = facts_of(spec, decode={"replicas": 8})
    windows = windows_of(facts, decode=replace(CALM, num_requests_waiting=10.0))
    decode = next(each for each in facts if each.role == "decode")
    windows[D][:3] = [
        replace(sample, workers=samples_of(decode, sample.workers[0], 4))
        for sample in windows[D][:3]
    ]

    held = run(spec, facts, windows)
    later = see(spec, facts, decode=replace(CALM, num_requests_waiting=10.0))

    assert (held.decision.replicas[D], later.decision.replicas[D]) == (8, 12)
    assert rules_of(held, "decode") == [rules.PENDING]


@pytest.mark.parametrize(
    ("usage", "rules_left"), [(0.80, [rules.TOLERANCE]), (0.74, []), (0.29, [rules.TOLERANCE])]
)
def test_differences_within_the_tolerance_do_nothing(usage: float, rules_left: list[str]):
    outcome = agreed(make_spec(), decode=replace(IDLE, kv_cache_usage_ratio=usage))

    assert outcome.decision.replicas[D] == 4
    assert rules_of(outcome, "decode") == rules_left


def test_the_tolerance_is_configurable():
    spec = make_spec(tolerance=0.0)

    assert see(spec, decode=replace(CALM, kv_cache_usage_ratio=0.76)).decision.replicas[D] == 5


def test_a_role_without_numbers_keeps_its_size_and_says_so():
    spec = make_spec(prefill=[{"name": "x", "replicas": 6, "minReplicas": 1, "maxReplicas": 9}])
    facts = facts_of(spec)
    windows = windows_of(facts)
    windows[P] = []

    outcome = run(spec, facts, windows)

    assert outcome.decision.replicas == {P: 6, D: 4}
    assert reasons(outcome) == ["MetricsMissing"]
    assert rules_of(outcome, "prefill") == [rules.METRICS]


def test_a_stale_worker_forbids_to_shrink_and_counts_as_idle_when_the_role_would_grow():
    spec = make_spec(decode=[{"name": "x", "replicas": 4, "maxReplicas": 1024}])
    facts = facts_of(spec)

    def with_one_stale(usage: float, now: float = NOW):
        windows = windows_of(facts, now=now, decode=replace(IDLE, kv_cache_usage_ratio=usage))
        windows[D] = [
            replace(sample, workers=sample.workers[:3], stale=("decode-x-3",))
            for sample in windows[D]
        ]
        return windows

    memory = run(spec, facts, with_one_stale(0.0)).memory
    idle = run(spec, facts, with_one_stale(0.0, NOW + 400), memory, now=NOW + 400)
    full = run(spec, facts, with_one_stale(1.0))
    not_proven = run(spec, facts, with_one_stale(0.9))

    assert idle.decision.replicas[D] == 4
    assert rules.METRICS in rules_of(idle, "decode")
    assert reasons(idle) == reasons(full) == reasons(not_proven) == ["MetricsMissing"]
    assert full.decision.replicas[D] == 4  # 3 of 4 at 100 % are 0.75 at least: not over
    assert not_proven.decision.replicas[D] == 4
    assert (
        see(spec, facts, decode=replace(CALM, kv_cache_usage_ratio=0.9)).decision.replicas[D] == 5
    )


def test_a_stale_decode_worker_hides_a_part_of_the_prefill_queue():
    spec = make_spec()
    facts = facts_of(spec)
    memory, now = None, NOW
    while now <= NOW + 310:
        windows = windows_of(facts, now=now, prefill=IDLE)
        windows[D] = [
            replace(sample, workers=sample.workers[:3], stale=("decode-x-3",))
            for sample in windows[D]
        ]
        outcome = run(spec, facts, windows, memory, now=now)
        memory, now = outcome.memory, now + 5.0

    assert outcome.decision.replicas[P] == 4
    assert agreed(spec, prefill=IDLE).decision.replicas[P] == 3


def test_a_role_that_starts_waits():
    spec = make_spec()
    facts = facts_of(spec, prefill={"replicas": 4, "ready": 0})

    outcome = see(spec, facts)

    assert outcome.decision.replicas[P] == 4
    assert rules_of(outcome, "prefill") == [rules.PENDING]
    assert reasons(outcome) == []


def test_a_new_worker_that_has_yet_to_answer_holds_its_role_and_is_no_problem_before_it_is_stale():
    spec = make_spec(scaleDown={"windowSeconds": 0})
    facts = facts_of(spec)
    silent, stale = windows_of(facts, decode=IDLE), windows_of(facts, decode=IDLE)
    three = silent[D][-1].workers[:3]
    silent[D][-1] = PoolSample(NOW, three)
    stale[D][-1] = PoolSample(NOW, three, ("decode-x-3",))

    assert (
        run(spec, facts, silent).decision.replicas[D]
        == run(spec, facts, stale).decision.replicas[D]
        == 4
    )
    assert rules_of(run(spec, facts, silent), "decode") == [rules.METRICS]
    assert reasons(run(spec, facts, silent)) == []
    assert reasons(run(spec, facts, stale)) == ["MetricsMissing"]
