"""Growth of a role: the thresholds of [O4], queues, backlog, headroom and latency targets."""

from dataclasses import replace
from typing import Any

import pytest

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.histogram import LatencyHistogram
from pdcluster_api.plan.autoscale.signals import decode_need, prefill_need
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    CALM,
    IDLE,
    NOW,
    D,
    P,
    agreed,
    facts_of,
    make_spec,
    observed,
    pool,
    rules_of,
    run,
    see,
    step_of,
    windows_of,
)

O4 = {
    "prefill": [pool(4, minReplicas=4, maxReplicas=12)],
    "decode": [pool(8, minReplicas=8, maxReplicas=24)],
}


def calm(**fields: Any) -> Any:
    return replace(CALM, **fields)


def idle(**fields: Any) -> Any:
    return replace(IDLE, **fields)


@pytest.mark.parametrize(
    ("prefill", "decode", "grows"),
    [
        ({"prefill_queue_requests": 3.0}, {}, [P]),  # 12 in the queue, threshold 8
        ({"engine_busy_ratio": 0.9}, {}, [P]),
        ({"gpu_utilization_ratio": 0.9}, {}, [P]),
        ({}, {"num_requests_waiting": 3.0}, [D]),  # 24 wait, threshold 16
        ({}, {"kv_cache_usage_ratio": 0.9}, [D]),
        # the queue stands where requests wait for a credit: at decode workers
        ({}, {"prefill_queue_requests": 1.5}, [P]),
        # no signals of those roles
        ({"num_requests_waiting": 100.0}, {"engine_busy_ratio": 1.0}, []),
        (
            {"prefill_queue_requests": 1.75},
            {"kv_cache_usage_ratio": 0.7, "num_requests_waiting": 1.75},
            [],
        ),  # under every scale-up threshold, over one to scale down
    ],
)
def test_a_role_grows_over_any_threshold(
    prefill: dict[str, float], decode: dict[str, float], grows: list[Any]
):
    spec = make_spec(**O4)

    outcome = see(spec, prefill=calm(**prefill), decode=calm(**decode))

    assert [
        key for key, replicas in outcome.decision.replicas.items() if replicas > {P: 4, D: 8}[key]
    ] == grows


@pytest.mark.parametrize(
    ("prefill", "shrinks"),
    [
        ({"prefill_queue_requests": 0.25, "engine_busy_ratio": 0.3}, True),
        ({"prefill_queue_requests": 0.25, "engine_busy_ratio": 0.5}, False),
        ({"prefill_queue_requests": 1.0}, False),
    ],
)
def test_prefill_shrinks_only_under_all_its_thresholds(prefill: dict[str, float], shrinks: bool):
    spec = make_spec(**O4)
    facts = facts_of(spec, prefill={"replicas": 6})

    outcome = agreed(spec, facts, prefill=idle(**prefill), decode=CALM)

    assert outcome.decision.replicas[P] == (5 if shrinks else 6)


@pytest.mark.parametrize(
    ("kv", "waiting", "shrinks"), [(0.2, 0.25, True), (0.4, 0.0, False), (0.2, 1.0, False)]
)
def test_decode_shrinks_only_under_all_its_thresholds(kv: float, waiting: float, shrinks: bool):
    spec = make_spec(**O4)
    facts = facts_of(spec, decode={"replicas": 10})

    outcome = agreed(
        spec,
        facts,
        prefill=CALM,
        decode=idle(kv_cache_usage_ratio=kv, num_requests_waiting=waiting),
    )

    assert outcome.decision.replicas[D] == (9 if shrinks else 10)


@pytest.mark.parametrize(
    ("queue", "size"), [(8.0, 4), (12.0, 5), (16.0, 5), (17.0, 6), (24.0, 6), (4000.0, 8)]
)
def test_a_queue_over_its_threshold_asks_for_a_worker_for_each_and_for_twice_at_most(
    queue: float, size: int
):
    assert (
        see(make_spec(), prefill=calm(prefill_queue_requests=queue / 4)).decision.replicas[P]
        == size
    )


def test_a_queue_moves_many_workers_no_farther_than_few():
    spec = make_spec(prefill=[pool(100)])

    assert see(spec, prefill=calm(prefill_queue_requests=0.16)).decision.replicas[P] == 101


def falling(per_second: float, role: str = "prefill", **now: float) -> Any:
    """Four workers of each role whose queue was longer by so much a second; all of the rest as it
    is now.
    """
    spec = make_spec()
    facts = facts_of(spec)
    windows = windows_of(facts, **{role: calm(**now)})
    field = "prefill_queue_requests" if role == "prefill" else "num_requests_waiting"
    for number, sample in enumerate(windows[role, "x"]):
        more = per_second * (NOW - sample.at) / 4
        windows[role, "x"][number] = replace(
            sample,
            workers=tuple(
                replace(each, **{field: getattr(each, field) + more}) for each in sample.workers
            ),
        )
    return run(spec, facts, windows)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_queue_that_is_soon_worked_off_asks_for_no_worker_nor_does_its_full_share(role: str):
    """[Y15]: no scale-up if the trend will be under the threshold in three intervals."""
    field = (
        {"prefill_queue_requests": 200.0, "engine_busy_ratio": 1.0}
        if role == "prefill"
        else {"num_requests_waiting": 200.0, "kv_cache_usage_ratio": 1.0}
    )

    soon, later, never = (falling(rate, role, **field) for rate in (10.0, 5.0, -5.0))

    assert soon.decision.replicas[role, "x"] == 4
    step = step_of(soon, rules.NEED, role)
    assert (step.before, step.after) == (4, 4)
    # of decode the share alone asks for 5.33
    assert later.decision.replicas[role, "x"] == (5 if role == "prefill" else 6)
    assert never.decision.replicas[role, "x"] == 8


def test_a_queue_that_falls_slowly_asks_for_one_more():
    assert falling(1.0, prefill_queue_requests=200.0).decision.replicas[P] == 5


def test_a_queue_is_not_laid_on_workers_of_which_little_is_known():
    """An operator that has just started cannot know which workers had a part of the load."""
    spec = make_spec()
    facts = facts_of(spec)

    first = run(spec, facts, windows_of(facts, rounds=1, prefill=calm(prefill_queue_requests=50.0)))

    assert first.decision.replicas[P] == 4
    assert rules_of(first, "prefill") == [rules.PENDING]
    assert see(spec, facts, prefill=calm(prefill_queue_requests=50.0)).decision.replicas[P] == 8


def test_a_need_can_be_worked_out_by_hand():
    spec = make_spec(prefill=[pool(3)], decode=[pool(8)], lines={"prefill": {"headroom": 0.1}})

    outcome = see(
        spec, prefill=calm(prefill_queue_requests=23.07 / 3), decode=calm(kv_cache_usage_ratio=0.9)
    )

    inputs = {(each.subject, each.name): each.value for each in outcome.decision.inputs}
    assert (inputs["prefill", "ready_workers"], inputs["prefill", "settled_workers"]) == (3.0, 3.0)
    # 3 + 23.07 / 8 - 1 = 4.88, and a tenth more; 8 x 0.9 / 0.75 = 9.6
    assert step_of(outcome, rules.NEED, "prefill").after == 5
    assert outcome.decision.replicas == {P: 6, D: 10}


def test_a_threshold_near_zero_asks_for_a_limited_number():
    spec = make_spec(lines={"decode": {"kvUsageUp": 1e-6, "kvUsageDown": 0.0}})

    assert see(spec, decode=calm(kv_cache_usage_ratio=1.0)).decision.replicas[D] == 64


def test_a_threshold_near_one_can_still_be_crossed():
    spec = make_spec(lines={"prefill": {"utilizationUp": 0.95}})

    assert see(spec, prefill=calm(engine_busy_ratio=0.97)).decision.replicas[P] == 4
    assert see(spec, prefill=calm(engine_busy_ratio=0.98)).decision.replicas[P] == 5


def test_a_backlog_is_the_time_that_the_queue_takes_at_the_measured_speed():
    spec = make_spec(lines={"prefill": {"backlogUpSeconds": 2.0}})
    speed = {"prefill_token_rate": 5000.0, "prefill_busy_rate": 0.5}

    over = see(
        spec,
        prefill=calm(prefill_queue_tokens=25_000.0, **speed),
        decode=calm(prefill_queue_tokens=5000.0),
    )
    under = see(spec, prefill=calm(prefill_queue_tokens=15_000.0, **speed))
    unknown = see(spec, prefill=calm(prefill_queue_tokens=30_000.0))

    assert over.decision.replicas[P] == 6  # 120000 tokens at 4 * 10000 per second: 3 s over 2 s
    assert under.decision.replicas[P] == unknown.decision.replicas[P] == 4
    backlog = [each for each in unknown.decision.inputs if each.name == "prefill_backlog_seconds"]
    assert [each.value for each in backlog] == [None]


def test_headroom_is_kept_above_the_measured_need():
    spec = make_spec(prefill=[pool(10)], lines={"prefill": {"headroom": 0.5}})

    # 8 workers are busy up to their threshold
    outcome = see(spec, prefill=calm(engine_busy_ratio=0.64))

    assert outcome.decision.replicas[P] == 12
    assert (step_of(outcome, rules.HEADROOM).before, step_of(outcome, rules.HEADROOM).after) == (
        10,
        12,
    )
    assert (
        see(make_spec(prefill=[pool(10)]), prefill=calm(engine_busy_ratio=0.64)).decision.replicas[
            P
        ]
        == 10
    )


def test_headroom_is_not_given_up_when_a_role_shrinks():
    spec = make_spec(
        prefill=[pool(10)], lines={"prefill": {"headroom": 0.5}}, scaleDown={"maxStep": 10}
    )

    # 4 workers' work, and half as many more
    assert agreed(spec, prefill=idle(engine_busy_ratio=0.32)).decision.replicas[P] == 6


def first_tokens(seconds: float) -> dict[str, dict[str, LatencyHistogram]]:
    return {"decode": {"ttft": observed((10, seconds))}}


@pytest.mark.parametrize(("seconds", "workers"), [(0.6, 6), (4.0, 8), (0.42, 4)])
def test_prefill_grows_to_keep_its_latency_target(seconds: float, workers: int):
    spec = make_spec(lines={"prefill": {"ttftSeconds": 0.4}})

    assert see(spec, latencies=first_tokens(seconds)).decision.replicas[P] == workers


def test_a_latency_over_its_target_forbids_to_shrink():
    spec = make_spec(lines={"prefill": {"ttftSeconds": 0.4}})

    late = agreed(spec, prefill=IDLE, latencies=first_tokens(0.41))
    early = agreed(spec, prefill=IDLE, latencies=first_tokens(0.2))

    assert (late.decision.replicas[P], early.decision.replicas[P]) == (4, 3)


def test_the_demand_of_prompts_is_the_least_that_prefill_shrinks_to():
    """[Y16] and [Y19]: requests * length / speed is the lower bound; what the decode workers
    prefill themselves is no part of it.
    """
    spec = make_spec(lines={"prefill": {"ttftSeconds": 1.0}}, scaleDown={"maxStep": 9})
    # 10000 tokens per second of one busy worker
    prefill = idle(prefill_token_rate=3000.0, prefill_busy_rate=0.3)
    decode = calm(
        request_rate=10.0,
        prompt_token_rate=10_000.0,
        prefill_token_rate=1000.0,
    )

    outcome = agreed(spec, prefill=prefill, decode=decode, latencies=first_tokens(0.5))

    # 40000 tokens per second, three quarters of them remote, 10000 per worker
    assert outcome.decision.replicas[P] == 3


def test_decode_grows_to_keep_its_latency_target():
    spec = make_spec(decode=[pool(8)], lines={"decode": {"tpotSeconds": 0.05}})

    def gaps(seconds: float) -> dict[str, dict[str, LatencyHistogram]]:
        return {"decode": {"itl": observed((100, seconds))}}

    assert see(spec, latencies=gaps(0.06)).decision.replicas[D] == 10
    assert see(spec, latencies=gaps(0.5)).decision.replicas[D] == 16
    assert agreed(spec, decode=IDLE, latencies=gaps(0.045)).decision.replicas[D] == 8


def test_the_correction_of_the_planner_that_is_adopted():
    """[Y16]: next_req 100 of 3000 tokens in 60 s, 2500 tokens per second and worker."""
    demand = 100 * 3000 / 60
    assert prefill_need(demand, 2500.0, 0.5) == 1.0
    assert prefill_need(demand, 2500.0, 1.0) == 2.0
    assert prefill_need(demand, 2500.0, 7.0) == 2.0
    assert decode_need(4, 0.100, 0.050) == 8.0
    assert decode_need(4, 0.025, 0.050) == 2.0


def test_the_static_example_comes_out_as_two_prefill_and_one_decode():
    """[O12]: a prefill worker does 5.6 requests per second within its target, a decode worker 10:
    2P1D carries min(5.6 * 2, 10).
    """
    lines = {"prefill": {"utilizationUp": 0.95}, "decode": {"kvUsageUp": 0.95}}
    spec = make_spec(prefill=[pool(1)], decode=[pool(1)], lines=lines)
    facts = facts_of(spec)

    for _ in range(3):
        sizes = {each.role: each.replicas for each in facts}
        windows = windows_of(
            facts,
            prefill=idle(
                engine_busy_ratio=min(1.0, 10 / (5.6 * sizes["prefill"])), request_rate=10.0
            ),
            decode=idle(kv_cache_usage_ratio=10 / (10 * sizes["decode"]) * 0.95),
        )
        outcome = run(spec, facts, windows)
        facts = facts_of(
            spec,
            **{
                role: {"replicas": number}
                for (role, _), number in outcome.decision.replicas.items()
            },
        )

    assert outcome.decision.replicas == {P: 2, D: 1}
    assert min(5.6 * 2, 10) / 3 == pytest.approx(3.3, abs=0.05)


def test_mixed_workers_are_judged_as_decode():
    spec = make_spec(mixed=[pool(4)])

    assert see(spec, mixed=calm(num_requests_waiting=10.0)).decision.replicas == {("mixed", "x"): 6}
    assert rules_of(see(spec)) == []
