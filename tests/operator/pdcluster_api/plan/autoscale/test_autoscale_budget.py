"""The budget of accelerators: growth that does not fit waits, what exceeds it goes, and pods that
end count.
"""

from dataclasses import replace
from typing import Any

import pytest

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.values import PoolFacts
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    CALM,
    IDLE,
    D,
    P,
    agreed,
    facts_of,
    make_spec,
    pool,
    reasons,
    rules_of,
    see,
    step_of,
)

FULL = replace(CALM, kv_cache_usage_ratio=0.9)
HUNGRY = replace(CALM, engine_busy_ratio=0.95)


def test_growth_stays_within_the_total():
    spec = make_spec(budget={"total": 9})

    outcome = see(spec, decode=replace(CALM, num_requests_waiting=20.0))

    assert outcome.decision.replicas == {P: 4, D: 5}
    step = step_of(outcome, rules.BUDGET, "decode")
    assert (step.before, step.after) == (8, 5)


def test_room_that_is_short_is_shared_by_what_each_role_misses():
    spec = make_spec(budget={"total": 10})

    outcome = see(
        spec,
        prefill=replace(CALM, prefill_queue_requests=20.0),
        decode=replace(CALM, num_requests_waiting=20.0),
    )

    assert outcome.decision.replicas == {P: 5, D: 5}


def test_pods_that_end_hold_their_accelerators():
    spec = make_spec(budget={"total": 8})
    ending = facts_of(spec, prefill={"replicas": 3, "current": 4, "ready": 3, "ending": 1})
    gone = facts_of(spec, prefill={"replicas": 3})

    assert see(spec, ending, decode=FULL).decision.replicas == {P: 3, D: 4}
    assert see(spec, gone, decode=FULL).decision.replicas == {P: 3, D: 5}


def test_a_pod_that_drains_can_be_taken_back_within_a_full_budget():
    spec = make_spec(budget={"total": 8})
    facts = facts_of(spec, prefill={"replicas": 3, "current": 4, "ready": 3, "ending": 1})

    assert see(spec, facts, prefill=HUNGRY).decision.replicas == {P: 4, D: 4}


def test_a_full_budget_takes_back_a_pod_that_drains_in_the_dearer_pool():
    pools = [pool(1, "cheap", gpu="H100"), pool(2, "dear", gpu="B200")]
    spec = make_spec(
        prefill=pools, decode=[pool(4, gpu="B300")], budget={"total": 8}, cost={"B200": 5.0}
    )
    dear = PoolFacts("prefill", "dear", "B200", replicas=2, current=3, ready=2, ending=1)
    facts = [dear if each.key == dear.key else each for each in facts_of(spec)]

    sizes = see(spec, facts, prefill=HUNGRY).decision.replicas

    assert (sizes[("prefill", "cheap")], sizes[("prefill", "dear")]) == (1, 3)


def test_what_one_role_gives_up_is_used_when_it_is_gone():
    spec = make_spec(budget={"total": 8}, scaleDown={"windowSeconds": 0})

    outcome = see(spec, prefill=IDLE, decode=FULL)

    assert outcome.decision.replicas == {P: 3, D: 4}


def test_a_type_has_its_own_budget_and_the_next_pool_takes_over():
    spec = make_spec(
        prefill=[pool(4, "b200", gpu="B200"), pool(0, "h100", gpu="H100")],
        decode=[pool(4, gpu="B300")],
        budget={"perGpu": {"B200": 4}},
    )

    outcome = see(spec, prefill=HUNGRY)

    assert outcome.decision.replicas[("prefill", "b200")] == 4
    assert outcome.decision.replicas[("prefill", "h100")] == 1


def test_both_roles_share_a_type():
    spec = make_spec(budget={"perGpu": {"H100": 9}})

    outcome = see(spec, prefill=HUNGRY, decode=FULL)

    assert sum(outcome.decision.replicas.values()) == 9


def test_a_role_alone_on_a_full_type_says_so():
    spec = make_spec(decode=[pool(4, gpu="B300")], budget={"perGpu": {"B300": 4}})

    outcome = see(spec, decode=FULL)

    assert outcome.changed is False
    assert rules.BUDGET in rules_of(outcome, "decode")


def test_a_role_keeps_its_last_worker_while_the_one_in_its_place_waits_for_room():
    prefill = [pool(1, "a", minReplicas=1), pool(3, "b", gpu="cpu")]
    spec = make_spec(prefill=prefill, decode=[pool(1, gpu="B300")], budget={"total": 2})
    facts = facts_of(
        spec,
        prefill_a={"replicas": 0},
        prefill_b={"replicas": 1, "current": 3, "ready": 1, "ending": 2},
    )

    outcome = see(spec, facts)

    assert outcome.decision.replicas == {("prefill", "a"): 0, ("prefill", "b"): 1, D: 1}
    assert reasons(outcome) == ["BudgetTooSmall"]


def test_a_minimum_that_its_type_forbids_takes_nothing_from_others():
    """It would be given back in the next decision, and taken again in the one after that."""
    decode = [pool(1, "a", minReplicas=1), pool(2, "b", gpu="cpu")]
    spec = make_spec(prefill=[pool(1)], decode=decode, budget={"total": 3, "perGpu": {"H100": 1}})
    facts = facts_of(spec, decode_a={"replicas": 0})

    assert see(spec, facts).decision.replicas == {P: 1, ("decode", "a"): 0, ("decode", "b"): 2}


def test_a_raised_minimum_waits_for_pods_that_still_end():
    spec = make_spec(decode=[pool(4, minReplicas=4)], budget={"total": 8})
    ending = facts_of(
        spec, prefill={"replicas": 4, "current": 6, "ready": 4, "ending": 2}, decode={"replicas": 2}
    )
    gone = facts_of(spec, decode={"replicas": 2})

    assert see(spec, ending).decision.replicas == {P: 4, D: 2}
    assert rules.BUDGET in rules_of(see(spec, ending), "decode/x")
    # no other pool takes the room
    assert see(spec, ending, prefill=HUNGRY).decision.replicas == {P: 4, D: 2}
    assert reasons(see(spec, ending)) == ["BudgetTooSmall"]
    assert see(spec, gone).decision.replicas == {P: 4, D: 4}


def test_a_raised_minimum_takes_back_pods_that_drain_while_another_waits_for_room():
    """They hold their accelerators already, so that nothing has to end before."""
    prefill = [pool(4), pool(1, "b", minReplicas=1)]
    spec = make_spec(prefill=prefill, decode=[pool(4, minReplicas=4)], budget={"total": 8})
    facts = facts_of(
        spec,
        prefill_b={"replicas": 0, "current": 1, "ready": 0, "ending": 1},
        decode={"replicas": 3},
    )

    assert see(spec, facts).decision.replicas == {P: 3, ("prefill", "b"): 1, D: 3}


def test_a_pod_that_the_budget_of_its_type_does_not_take_back_leaves_growth_to_the_next_pool():
    decode = [pool(2, "a", gpu="cpu"), pool(2, "b", gpu="H200")]
    spec = make_spec(prefill=[pool(2, gpu="B200")], decode=decode, budget={"perGpu": {"cpu": 2}})
    facts = facts_of(spec, decode_a={"replicas": 2, "current": 3, "ready": 2, "ending": 1})

    assert see(spec, facts, decode=FULL).decision.replicas == {
        P: 2,
        ("decode", "a"): 2,
        ("decode", "b"): 3,
    }


def test_a_budget_that_was_lowered_takes_workers_at_once():
    spec = make_spec(
        prefill=[pool(4, minReplicas=4)], decode=[pool(8, minReplicas=2)], budget={"total": 9}
    )

    outcome = see(spec)

    assert outcome.decision.replicas == {P: 4, D: 5}
    assert rules_of(outcome, "decode/x") == [rules.BUDGET]


def test_a_budget_below_the_minima_keeps_a_worker_of_each_role_and_is_reported():
    spec = make_spec(
        prefill=[pool(2, minReplicas=2)], decode=[pool(2, minReplicas=2)], budget={"total": 2}
    )
    least = make_spec(prefill=[pool(2)], decode=[pool(2)], budget={"total": 1})

    assert see(spec).decision.replicas == {P: 1, D: 1}
    assert reasons(see(spec)) == ["BudgetTooSmall"]
    assert see(least).decision.replicas == {P: 1, D: 1}
    assert reasons(see(least)) == ["BudgetTooSmall"]


def test_pools_that_are_no_longer_declared_count_until_their_pods_are_gone():
    spec = make_spec(budget={"total": 9})
    left = PoolFacts("prefill", "old", "H100", replicas=0, current=1, ready=0, ending=1)

    assert see(spec, [*facts_of(spec), left], decode=FULL).decision.replicas == {P: 4, D: 4}


def test_a_ratio_that_the_budget_forbids_is_reported():
    spec = make_spec(prefill=[pool(1)], decode=[pool(7)], budget={"total": 8}, ratio={"min": 0.5})

    outcome = see(spec)

    assert outcome.decision.replicas == {P: 1, D: 7}
    assert reasons(outcome) == ["RatioConstraintViolated"]
    assert rules_of(outcome, "prefill") == [rules.RATIO, rules.BUDGET]


def test_a_mixed_role_keeps_to_the_budget():
    spec = make_spec(mixed=[pool(4)], budget={"total": 5})

    outcome = see(spec, mixed=replace(CALM, num_requests_waiting=20.0))

    assert outcome.decision.replicas == {("mixed", "x"): 5}
    assert rules.BUDGET in rules_of(outcome, "mixed")


def test_one_pool_that_gives_leaves_the_dearest_last_in_line():
    spec = make_spec(prefill=[pool(4)], decode=[pool(3, "a"), pool(3, "b")], budget={"total": 9})

    assert agreed(spec, prefill=CALM).decision.replicas == {
        P: 3,
        ("decode", "a"): 3,
        ("decode", "b"): 3,
    }


def test_a_lost_pod_comes_again_while_the_one_above_it_still_ends():
    left = PoolFacts("prefill", "x", "H100", replicas=1, current=1, ready=0, ending=1)

    assert [left.held(size).workers for size in (1, 2, 3)] == [2, 2, 3]


def test_a_lost_pod_below_one_that_drains_is_counted_while_its_statefulset_asks_for_it():
    """With the second of three pods lost and the third draining, growth to two makes three."""
    spec = make_spec(prefill=[pool(1)], decode=[pool(3)], budget={"total": 5})
    facts = facts_of(spec, prefill={"replicas": 1, "current": 2, "ready": 1, "ending": 1, "top": 3})

    assert see(spec, facts, prefill=HUNGRY, decode=FULL).decision.replicas == {P: 2, D: 3}
    assert see(
        make_spec(prefill=[pool(1)], decode=[pool(3)], budget={"total": 5}), facts, decode=FULL
    ).decision.replicas == {P: 1, D: 3}


def test_the_band_comes_before_the_budget_of_a_type():
    """Steps of the band come first, then what the budget allows of them."""
    spec = make_spec(
        prefill=[pool(2, gpu="B200")],
        decode=[pool(4)],
        ratio={"min": 1.0},
        budget={"perGpu": {"B200": 2}},
    )

    outcome = see(spec, decode=replace(CALM, num_requests_waiting=20.0))

    assert outcome.decision.replicas == {P: 2, D: 4}
    assert rules_of(outcome, "prefill") == [rules.RATIO, rules.BUDGET]
    assert rules_of(outcome, "decode") == [rules.NEED, rules.BUDGET]


@pytest.mark.parametrize(
    ("pools", "settings", "limits"),
    [
        ([pool(4, maxReplicas=4)], {}, "maxReplicas"),
        ([pool(4)], {"budget": {"total": 8}}, "autoscale.budget"),
        ([pool(4)], {"budget": {"perGpu": {"H100": 8}}}, "autoscale.budget"),
        ([pool(4, maxReplicas=5)], {"budget": {"total": 8}}, "maxReplicas and autoscale.budget"),
    ],
)
def test_a_limit_that_keeps_a_role_from_what_it_needs_is_reported(
    pools: list[dict[str, Any]], settings: dict[str, Any], limits: str
):
    spec = make_spec(decode=pools, **settings)

    for queue in (20.0, 30.0, 300.0):
        outcome = see(spec, decode=replace(CALM, num_requests_waiting=queue))
        (problem,) = outcome.decision.problems
        assert (problem.reason, problem.message.split(": held by ")[1]) == (
            "ScalingLimited",
            limits,
        )
    assert see(spec).decision.problems == ()


def test_a_role_for_which_there_is_no_budget_at_all_says_so():
    spec = make_spec(prefill=[pool(0)], budget={"total": 4})

    outcome = see(spec)

    assert outcome.decision.replicas == {P: 0, D: 4}
    assert reasons(outcome) == ["ScalingLimited"]


def test_a_role_that_has_no_worker_waits_for_room_for_its_first_while_the_other_takes_a_pod_back():
    spec = make_spec(
        prefill=[pool(1, minReplicas=1)], decode=[pool(1, minReplicas=1)], budget={"total": 3}
    )
    none = facts_of(spec, prefill={"replicas": 0}, decode={"replicas": 0})
    ending = facts_of(
        spec,
        prefill={"replicas": 0},
        decode={"replicas": 0, "current": 2, "ready": 0, "ending": 2},
    )
    left = PoolFacts("decode", "old", "H100", replicas=0, current=1, ready=0, ending=1)

    waiting, one_gone = see(spec, [*ending, left]), see(spec, ending)

    assert waiting.decision.replicas == {P: 0, D: 1}
    assert rules.BUDGET in rules_of(waiting, "prefill/x")
    assert "BudgetTooSmall" in reasons(waiting)
    assert one_gone.decision.replicas == see(spec, none).decision.replicas == {P: 1, D: 1}


def test_a_lowered_budget_takes_workers_that_start_and_not_the_last_that_is_ready():
    decode = [pool(1, "a"), pool(3, "b", minReplicas=3)]
    spec = make_spec(prefill=[pool(1)], decode=decode, budget={"total": 4})
    starting = facts_of(spec, decode_b={"replicas": 3, "ready": 0})

    assert see(spec, starting).decision.replicas == {P: 1, ("decode", "a"): 1, ("decode", "b"): 2}
    assert see(spec).decision.replicas == {P: 1, ("decode", "a"): 0, ("decode", "b"): 3}


def test_of_pools_above_their_minimum_that_gives_first_which_has_workers_that_start():
    spec = make_spec(prefill=[pool(6)], decode=[pool(4)], budget={"total": 8})

    outcome = see(spec, facts_of(spec, decode={"replicas": 4, "ready": 2, "unready_top": 2}))

    assert outcome.decision.replicas == {P: 6, D: 2}


def test_a_budget_is_exceeded_while_the_one_ready_worker_is_the_last_to_have_come_and_says_so():
    spec = make_spec(prefill=[pool(1)], decode=[pool(3)], budget={"total": 2})

    outcome = see(spec, facts_of(spec, decode={"replicas": 3, "ready": 1}))

    assert outcome.decision.replicas == {P: 1, D: 3}
    assert reasons(outcome) == ["BudgetTooSmall"]
