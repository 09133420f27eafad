"""The edge of capacity: pods that no node takes, pods that cannot be created, and which pool is
asked instead.
"""

from dataclasses import replace

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.values import Memory
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    CALM,
    IDLE,
    NOW,
    D,
    P,
    agreed,
    facts_of,
    make_spec,
    pool,
    reasons,
    rules_of,
    run,
    see,
    step_of,
    windows_of,
)

FULL = replace(CALM, kv_cache_usage_ratio=0.9)
B200, H100 = ("prefill", "b200"), ("prefill", "h100")
TWO = [
    pool(4, "b200", gpu="B200", minReplicas=1, maxReplicas=8),
    pool(2, "h100", gpu="H100", minReplicas=0, maxReplicas=8),
]
HUNGRY = replace(CALM, engine_busy_ratio=0.95)


def waiting(number: int, top: int, seconds: float = 130.0) -> dict[str, float]:
    return {"unschedulable": number, "unschedulable_top": top, "unschedulable_seconds": seconds}


def test_the_cheapest_pool_grows_and_the_dearest_shrinks():
    spec = make_spec(prefill=TWO, cost={"B200": 3.0, "H100": 1.0})

    up = see(spec, prefill=HUNGRY)
    down = agreed(spec, prefill=IDLE)

    assert (up.decision.replicas[B200], up.decision.replicas[H100]) == (4, 4)
    assert (down.decision.replicas[B200], down.decision.replicas[H100]) == (3, 2)


def test_of_equal_prices_the_first_pool_is_the_cheaper():
    spec = make_spec(prefill=TWO)

    assert see(spec, prefill=HUNGRY).decision.replicas[B200] == 6
    assert agreed(spec, prefill=IDLE).decision.replicas[H100] == 1


def test_a_full_pool_hands_on_to_the_next():
    spec = make_spec(prefill=[{**TWO[0], "maxReplicas": 5}, TWO[1]])

    assert see(spec, prefill=HUNGRY).decision.replicas == {B200: 5, H100: 3, D: 4}


def test_top_ordinals_that_no_node_takes_are_given_back_and_the_other_type_grows():
    spec = make_spec(prefill=TWO)
    facts = facts_of(spec, prefill_b200={"replicas": 4, "ready": 2, **waiting(2, 2)})

    outcome = see(spec, facts, prefill=replace(CALM, engine_busy_ratio=1.0))

    assert outcome.decision.replicas[B200] == 2
    assert outcome.decision.replicas[H100] == 3  # 4 ready workers at 100 % of 80 % need 5
    assert outcome.memory.backoff == {"B200": NOW + 600}
    assert reasons(outcome) == ["CapacityShort"]
    assert step_of(outcome, rules.CAPACITY, "prefill/b200").after == 2


def test_a_short_type_is_left_alone_for_a_while_and_then_tried_again():
    spec = make_spec(prefill=[TWO[0]])
    facts = facts_of(spec)
    memory = Memory(backoff={"B200": NOW + 600})

    def at(seconds: float):
        now = NOW + seconds
        return run(spec, facts, windows_of(facts, now=now, prefill=HUNGRY), memory, now=now)

    assert at(599).decision.replicas[B200] == 4
    assert reasons(at(599)) == ["CapacityShort"]
    assert rules.CAPACITY in rules_of(at(599), "prefill")
    assert at(600).decision.replicas[B200] == 5
    assert reasons(at(600)) == []


def test_what_is_short_is_what_is_needed_and_not_only_what_waits():
    spec = make_spec(prefill=[{**TWO[0], "minReplicas": 4, "maxReplicas": 12}])
    facts = facts_of(spec, prefill={"replicas": 4, "ready": 3, **waiting(1, 1)})

    outcome = see(spec, facts, prefill=replace(CALM, prefill_queue_requests=16.0))

    assert reasons(outcome) == ["CapacityShort"]
    # 6 are needed, 3 serve
    assert outcome.decision.problems[0].message.startswith("B200 is short of 3 workers")


def test_what_both_roles_miss_of_a_type_adds_up():
    spec = make_spec()
    facts = facts_of(spec)
    memory = Memory(backoff={"H100": NOW + 600})

    outcome = run(spec, facts, windows_of(facts, prefill=HUNGRY, decode=FULL), memory)

    assert [each.message.partition(";")[0] for each in outcome.decision.problems] == [
        "H100 is short of 2 workers that no node takes"
    ]


def test_a_type_without_room_is_left_alone_by_both_roles():
    spec = make_spec(prefill=[pool(4, maxReplicas=9)], decode=[pool(4, maxReplicas=9)])
    facts = facts_of(spec, prefill={"replicas": 4, "ready": 3, **waiting(1, 1)})

    outcome = see(spec, facts, decode=FULL)

    assert outcome.decision.replicas == {P: 3, D: 4}
    assert reasons(outcome) == ["CapacityShort"]


def test_a_waiting_pod_in_the_middle_costs_no_healthy_neighbour():
    spec = make_spec(prefill=TWO)
    facts = facts_of(spec, prefill_b200={"replicas": 4, "ready": 3, **waiting(1, 0)})

    calm = see(spec, facts)
    hungry = see(spec, facts, prefill=replace(CALM, engine_busy_ratio=1.0))

    assert calm.decision.replicas[B200] == hungry.decision.replicas[B200] == 4
    # 5 ready ones need 7: the one that is lost is asked for once more
    assert hungry.decision.replicas[H100] == 4
    assert reasons(calm) == ["CapacityShort"]


def test_a_pod_that_waits_for_a_moment_is_on_its_way():
    spec = make_spec(prefill=TWO)
    facts = facts_of(spec, prefill_b200={"replicas": 4, "ready": 3, **waiting(1, 1, seconds=119.0)})

    outcome = see(spec, facts)

    assert (outcome.changed, outcome.decision.problems, outcome.memory.backoff) == (False, (), {})


def test_min_replicas_and_the_last_worker_are_not_given_back():
    spec = make_spec(prefill=[{**TWO[0], "minReplicas": 3}])
    facts = facts_of(spec, prefill={"replicas": 4, "ready": 0, **waiting(4, 4)})

    assert see(spec, facts).decision.replicas[B200] == 3
    alone = make_spec(prefill=[pool(1, "b200", gpu="B200")])
    outcome = see(alone, facts_of(alone, prefill={"replicas": 1, "ready": 0, **waiting(1, 1)}))
    assert outcome.decision.replicas[B200] == 1


def test_a_role_whose_only_type_has_no_room_starts_on_another():
    spec = make_spec(prefill=TWO)
    facts = facts_of(spec, prefill_b200={"ready": 0, **waiting(4, 4)}, prefill_h100={"replicas": 0})

    outcome = see(spec, facts)

    assert outcome.decision.replicas == {B200: 1, H100: 1, D: 4}


def test_pods_that_cannot_be_created_make_the_other_pool_grow():
    spec = make_spec(prefill=TWO)
    facts = facts_of(
        spec,
        prefill_b200={"replicas": 4, "current": 2, "ready": 2, "fault": "exceeded quota: gpus"},
    )

    outcome = see(spec, facts, prefill=replace(CALM, engine_busy_ratio=1.0))

    assert outcome.decision.replicas == {B200: 4, H100: 3, D: 4}
    assert reasons(outcome) == ["CapacityShort"]


def test_a_role_that_shrinks_gives_first_what_no_node_took():
    spec = make_spec(prefill=TWO, cost={"B200": 3.0}, capacitySeconds=10_000)
    facts = facts_of(spec, prefill_h100={"replicas": 2, "ready": 1, **waiting(1, 1)})

    assert agreed(spec, facts, prefill=IDLE).decision.replicas == {B200: 4, H100: 1, D: 4}
