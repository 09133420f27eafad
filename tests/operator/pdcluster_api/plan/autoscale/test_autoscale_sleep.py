"""All pools go to zero together once no request has come for long, and a request that a router
holds brings the first worker of each role back at once.
"""

from dataclasses import replace
from typing import Any

import pytest

from pdcluster_api.plan.autoscale.values import Memory, WorkerSample
from tests.operator.pdcluster_api.plan.autoscale.sleepers import (
    QUIET,
    after,
    held,
    once,
    sleeping,
    sleepy,
)
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    NOW,
    D,
    M,
    P,
    facts_of,
    pool,
    reasons,
    rules_of,
    run,
    step_of,
    windows_of,
)

ZERO = {P: 0, D: 0}
ONE = {P: 1, D: 1}


def test_both_roles_sleep_together_once_no_request_came_for_the_window():
    spec = sleepy()

    assert after(55, spec).decision.replicas == ONE
    outcome = after(60, spec)
    assert outcome.decision.replicas == ZERO
    assert step_of(outcome, "sleep", "prefill").why == "no request for 60 s: all roles sleep"
    assert reasons(outcome) == []


@pytest.mark.parametrize(
    "busy",
    [
        {"decode": replace(QUIET, num_requests_running=1.0)},
        {"decode": replace(QUIET, num_requests_waiting=1.0)},
        {"decode": replace(QUIET, prompt_token_rate=0.1)},
        {"prefill": replace(QUIET, prefill_queue_requests=1.0)},
        {"prefill": replace(QUIET, prompt_token_rate=None)},
        {"router": replace(held(0.0), request_rate=0.1)},
        {"router": held(1.0)},
    ],
    ids=["runs", "waits", "came", "prefill waits", "not known", "came to a router", "is held"],
)
def test_any_request_keeps_it_awake(busy: dict[str, WorkerSample]):
    assert after(300, sleepy(), **busy).decision.replicas == ONE


def test_it_sleeps_from_its_smallest_size_step_by_step():
    spec = sleepy(decode=[pool(3, minReplicas=0)])

    assert after(60, spec).decision.replicas == {P: 1, D: 2}
    assert after(90, spec, facts_of(spec, decode={"replicas": 1})).decision.replicas == ZERO


def test_it_sleeps_from_the_smallest_size_that_a_ratio_allows():
    spec = sleepy(prefill=[pool(2, minReplicas=0)], ratio={"min": 2})

    assert after(90, spec).decision.replicas == ZERO


@pytest.mark.parametrize(
    "spec",
    [
        sleepy(decode=[pool(1)]),
        sleepy(decode=[pool(1, minReplicas=1)]),
        sleepy(decode=[pool(1, minReplicas=0), pool(0, "y")]),
        sleepy(mode="Advise"),
    ],
    ids=["no minimum", "minimum 1", "one of two pools", "Advise"],
)
def test_only_pools_of_a_minimum_of_zero_sleep(spec: Any):
    replicas = after(300, spec).decision.replicas

    assert (replicas[P], replicas[D]) == (1, 1)


def test_a_schedule_with_a_minimum_keeps_it_awake_and_wakes_it():
    noon = {"name": "day", "role": "decode", "pool": "x", "start": "11:00", "end": "13:00"}
    spec = sleepy(schedules=[{**noon, "minReplicas": 1}])

    assert after(300, spec).decision.replicas == ONE
    assert once(spec, sleeping(spec)).decision.replicas[D] == 1


def test_it_does_not_sleep_before_each_role_has_a_ready_worker():
    spec = sleepy()

    found = after(300, spec, facts_of(spec, prefill={"ready": 0, "unready_top": 1}))
    assert found.decision.replicas == ONE


def test_it_does_not_sleep_where_no_router_says_what_it_has():
    spec = sleepy()
    facts = facts_of(spec, router={"ready": 0})

    assert after(300, spec, facts).decision.replicas == ONE


@pytest.mark.parametrize(("decode", "replicas"), [(1, ZERO), (2, ONE)], ids=["same", "changed"])
def test_a_change_of_size_begins_the_wait_again(decode: int, replicas: dict[Any, int]):
    sizes = {"prefill": 1, "decode": decode}
    memory = Memory(sizes=sizes, at=NOW - 5.0, idle_since=NOW - 100.0)

    assert after(0, sleepy(), memory=memory).decision.replicas == replicas


def test_a_role_that_waits_in_its_window_to_scale_down_goes_first():
    spec = sleepy(decode=[pool(3, minReplicas=0)])
    memory = Memory(
        recommendations={"decode": ((NOW - 10.0, 1),)},
        sizes={"prefill": 1, "decode": 3},
        at=NOW - 5.0,
        idle_since=NOW - 100.0,
    )

    assert after(0, spec, memory=memory).decision.replicas == {P: 1, D: 3}


@pytest.mark.parametrize(("number", "said"), [(1.0, "1 request"), (3.0, "3 requests")])
def test_a_held_request_wakes_both_roles_at_once(number: float, said: str):
    spec = sleepy(scaleUp={"windowSeconds": 600})
    outcome = once(spec, sleeping(spec), router=held(number / 2))

    assert outcome.decision.replicas == ONE
    assert step_of(outcome, "wake", "decode").why == f"routers hold {said}"
    assert rules_of(outcome, "decode/x") == ["pool"]


def test_it_sleeps_on_while_no_request_is_held():
    spec = sleepy()
    outcome = once(spec, sleeping(spec))

    assert (outcome.decision.replicas, outcome.changed, reasons(outcome)) == (ZERO, False, [])


def test_mixed_workers_sleep_and_wake():
    spec = sleepy(mixed=[pool(1, minReplicas=0)])

    assert after(60, spec).decision.replicas == {M: 0}
    assert once(spec, sleeping(spec), router=held(1.0)).decision.replicas == {M: 1}


def test_a_wake_keeps_to_the_budget_and_begins_with_the_role_that_answers():
    spec = sleepy(budget={"total": 1})

    assert once(spec, sleeping(spec), router=held(1.0)).decision.replicas == {P: 0, D: 1}


def test_nothing_wakes_for_decode_workers_of_a_type_that_is_left_alone():
    spec = sleepy(decode=[pool(1, gpu="B200", minReplicas=0)])
    facts = sleeping(spec)
    memory = replace(after(0, spec, facts).memory, backoff={"B200": NOW + 300.0})
    windows = windows_of(facts, router=held(1.0))

    outcome = run(spec, facts, windows, memory)
    assert outcome.decision.replicas == ZERO
    assert step_of(outcome, "sleep", "prefill").why == (
        "no decode worker can come, and none serves without one"
    )
    assert reasons(outcome) == ["CapacityShort"]


def test_it_wakes_where_nothing_could_hold_a_request():
    spec = sleepy()

    found = once(spec, sleeping(spec, router={"replicas": 0}))
    assert found.decision.replicas == ONE


def test_a_router_that_gives_no_numbers_is_reported_while_all_sleep():
    spec = sleepy()
    facts = sleeping(spec)
    windows = windows_of(facts, router=held(0.0))
    windows["router", "r"] = [replace(windows["router", "r"][-1], workers=(), stale=("r-0", "r-1"))]

    outcome = run(spec, facts, windows)
    assert outcome.decision.replicas == ZERO
    (problem,) = outcome.decision.problems
    assert (problem.reason, problem.message) == (
        "MetricsMissing",
        "router r-0 (and 1 more) gives no numbers that can be used, so a request that it holds "
        "wakes nothing; look at its /metrics",
    )
