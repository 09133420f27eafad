"""Budget, price and ratio count the accelerators of a worker, of which it may have several."""

from dataclasses import replace
from typing import Any

import pytest

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.pools import ALL, WORKERS, Budget, Pool, relative_price
from pdcluster_api.plan.autoscale.values import Holding, PoolFacts
from pdcluster_schema.autoscale import BudgetSpec
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.sections import AcceleratorSpec
from pdcluster_schema.values import MAX_WORKERS
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    CALM,
    D,
    P,
    facts_of,
    make_spec,
    pool,
    reasons,
    see,
    step_of,
)

CROWDED = replace(CALM, kv_cache_usage_ratio=0.99, num_requests_waiting=500.0)
HOT = replace(CROWDED, engine_busy_ratio=0.99, prefill_queue_requests=500.0)
EIGHT = {"gpu": "B200", "gpusPerReplica": 8}


def settled(spec: PDClusterSpec, **workers: Any) -> Any:
    """The decision at which sizes stay, all pods made at once."""
    facts, before = facts_of(spec), None
    for _ in range(12):
        outcome = see(spec, facts, **workers)
        if outcome.decision.replicas == before:
            return outcome
        before = outcome.decision.replicas
        facts = [
            replace(
                each, replicas=before[each.key], current=before[each.key], ready=before[each.key]
            )
            for each in facts
        ]
    raise AssertionError("sizes still change")


def test_two_pools_of_eight_share_a_budget_of_sixteen() -> None:
    """Sixteen accelerators are two workers, however hot they are."""
    spec = make_spec(
        prefill=[pool(1, **EIGHT)],
        decode=[pool(1, **EIGHT)],
        budget={"total": 16, "perGpu": {"B200": 16}},
    )

    outcome = settled(spec, prefill=HOT, decode=HOT)

    assert outcome.decision.replicas == {P: 1, D: 1}
    assert reasons(outcome) == ["ScalingLimited", "ScalingLimited"]


def test_ranks_are_accelerators_where_the_pool_gives_no_number() -> None:
    pools = {
        "prefill": [pool(1, gpu="B200")],
        "decode": [pool(1, gpu="B200")],
        "budget": {"total": 24},
    }
    spec = make_spec(**pools)
    ranks = spec.engine.model_copy(update={"tensor_parallel_size": 4, "pipeline_parallel_size": 2})
    spec = spec.model_copy(update={"engine": ranks})

    assert sum(settled(spec, prefill=HOT, decode=HOT).decision.replicas.values()) == 3


def test_a_worker_that_does_not_fit_leaves_room_for_a_smaller_one() -> None:
    prefill = [pool(1, "large", **EIGHT), pool(0, "small", gpu="B200")]
    spec = make_spec(prefill=prefill, decode=[pool(1)], budget={"total": 12})

    replicas = settled(spec, prefill=HOT).decision.replicas

    assert replicas == {("prefill", "large"): 1, ("prefill", "small"): 3, D: 1}


def test_pods_that_end_hold_all_their_accelerators() -> None:
    spec = make_spec(prefill=[pool(3, **EIGHT)], decode=[pool(2)], budget={"total": 34})
    ending = facts_of(spec, prefill={"replicas": 2, "current": 4, "ready": 2, "ending": 2})

    outcome = see(spec, ending, decode=CROWDED)

    assert outcome.decision.replicas == {P: 2, D: 2}
    assert step_of(outcome, rules.BUDGET, "decode").after == 2


def test_routers_hold_no_accelerator_of_the_budget() -> None:
    spec = make_spec(prefill=[pool(1, **EIGHT)], decode=[pool(1, **EIGHT)], budget={"total": 16})
    router = PoolFacts("router", "front", "cpu", 2, 2, 2)

    outcome = see(spec, [*facts_of(spec), router])

    assert outcome.decision.replicas == {P: 1, D: 1}
    assert outcome.decision.problems == ()


def test_another_revision_counts_with_the_number_that_it_had() -> None:
    spec = make_spec(prefill=[pool(1)], decode=[pool(1, gpusPerReplica=2)], budget={"total": 12})
    before = Holding(1, 1, (0,), grows=False, gpus_per_replica=8)
    now = Holding(1, 1, (0,), grows=True, gpus_per_replica=2)
    facts = facts_of(spec, decode={"holdings": (before, now)})

    assert see(spec, facts, decode=CROWDED).decision.replicas == {P: 1, D: 1}
    assert see(spec, facts, prefill=HOT).decision.replicas == {P: 2, D: 1}


def test_small_workers_stay_where_one_of_many_accelerators_gives_way() -> None:
    spec = make_spec(
        prefill=[pool(1, **EIGHT), {**pool(1), "name": "small"}],
        decode=[pool(3, gpu="B200", minReplicas=1)],
        budget={"perGpu": {"B200": 3}},
    )

    outcome = see(spec, prefill=CALM, decode=CROWDED)

    assert outcome.decision.replicas[D] == 3
    assert not [each for each in outcome.decision.steps if each.subject == "decode/x"]


def test_one_worker_of_each_role_over_the_budget_is_reported_in_accelerators() -> None:
    spec = make_spec(prefill=[pool(1, **EIGHT)], decode=[pool(1, **EIGHT)], budget={"total": 9})

    problem = see(spec).decision.problems[0]

    assert problem.reason == "BudgetTooSmall"
    assert "16 of 9" in problem.message


def test_the_ratio_weighs_a_worker_by_all_its_accelerators() -> None:
    """One of eight is as much prefill as eight of one are decode."""
    spec = make_spec(
        prefill=[pool(1, gpusPerReplica=8)], decode=[pool(8)], ratio={"min": 1.0, "max": 1.0}
    )

    outcome = see(spec, decode=replace(CALM, num_requests_waiting=20.0))

    assert outcome.decision.replicas == {P: 2, D: 16}
    assert "RatioConstraintViolated" not in reasons(outcome)


def test_a_price_is_of_one_accelerator_and_the_number_is_reported() -> None:
    """The pool whose accelerators cost less grows, however many its workers have."""
    prefill = [pool(1, "b200", gpu="B200"), pool(1, "h100", gpusPerReplica=8)]
    spec = make_spec(prefill=prefill, decode=[pool(1)], cost={"B200": 3.0, "H100": 2.0})

    outcome = see(spec, prefill=replace(CALM, engine_busy_ratio=0.95))

    assert outcome.decision.replicas[("prefill", "h100")] == 2


@pytest.mark.parametrize(
    ("prices", "cost", "found"),
    [
        ({}, {}, {"H100": 1.0, "B200": 1.0}),
        ({"H100": 2.0, "B200": 5.0}, {}, {"H100": 2.0, "B200": 5.0}),
        ({"H100": 2.0}, {}, {"H100": 1.0, "B200": 1.0}),  # no measure for both
        ({"H100": 2.0, "B200": 5.0}, {"B200": 3.0}, {"H100": 1.0, "B200": 3.0}),
    ],
)
def test_the_autoscaler_goes_by_prices_where_every_type_has_one(
    prices: dict[str, float], cost: dict[str, float], found: dict[str, float]
) -> None:
    spec = make_spec(prefill=[pool(1)], decode=[pool(1, gpu="B200")], cost=cost)
    own = {gpu: AcceleratorSpec(price_per_hour=each) for gpu, each in prices.items()}
    spec = spec.model_copy(update={"accelerators": own})

    assert {gpu: relative_price(spec, gpu) for gpu in found} == found


def test_both_the_workers_and_the_accelerators_of_an_object_are_limited() -> None:
    pools = [
        Pool(PoolFacts(role, "x", "H100", 0, 0, 0), 0, high=4000) for role in ("prefill", "decode")
    ]

    assert len(WORKERS) > 63  # no type has such a name
    assert Budget.of(BudgetSpec(), [], pools).limits == {WORKERS: MAX_WORKERS}
    spec = BudgetSpec(total=MAX_WORKERS * 8)
    assert Budget.of(spec, [], pools).limits == {ALL: MAX_WORKERS * 8, WORKERS: MAX_WORKERS}
