"""Budget, price and ratio count the accelerators of a worker, of which it may have several."""

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.pools import ALL, WORKERS, Budget, Pool
from pdcluster_api.plan.autoscale.values import Holding, PoolFacts
from pdcluster_schema.autoscale import BudgetSpec
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.values import MAX_WORKERS
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    CALM,
    IDLE,
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
LOADS = {"idle": IDLE, "calm": CALM, "hot": HOT}
EIGHT = {"gpu": "B200", "gpusPerReplica": 8}


def accelerators(spec: PDClusterSpec, replicas: Any) -> Counter[str]:
    """Accelerators of a decision, by type and in all."""
    sums = Counter[str]()
    for role, declared in spec.roles.present().items():
        for each in declared.pools:
            number = replicas[role, each.name] * (each.gpus_per_replica or 1)
            sums[each.gpu] += number
            sums["total"] += number
    return sums


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
    assert "16 of 16 accelerators, 16 of 16 B200" in step_of(outcome, rules.BUDGET, "decode").why
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
    why = step_of(outcome, rules.BUDGET, "decode").why
    assert why == "34 of 34 accelerators are held or asked for, 16 by pods that end"


def test_pods_of_pools_that_are_gone_count_with_their_own_number() -> None:
    spec = make_spec(prefill=[pool(1)], decode=[pool(2)], budget={"total": 20})
    gone = PoolFacts("decode", "old", "B200", 0, 2, 0, ending=2, gpus_per_replica=8)

    outcome = see(spec, [*facts_of(spec), gone], decode=CROWDED)

    assert outcome.decision.replicas == {P: 1, D: 3}


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


def test_a_lowered_budget_takes_workers_until_their_accelerators_fit() -> None:
    spec = make_spec(prefill=[pool(2, **EIGHT)], decode=[pool(3, **EIGHT)], budget={"total": 25})

    outcome = see(spec)

    assert outcome.decision.replicas == {P: 1, D: 2}
    assert "40 of 25" in step_of(outcome, rules.BUDGET, "decode/x").why


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
    why = step_of(outcome, rules.POOL, "prefill/h100").why
    assert why == "the cheapest pool that has capacity: 8 x H100 at a price of 2 each"


def test_capacity_that_is_short_is_of_workers_with_all_their_accelerators() -> None:
    waiting = {"ready": 1, "unschedulable": 2, "unschedulable_top": 2, "unschedulable_seconds": 999}
    spec = make_spec(prefill=[pool(3, **EIGHT)], decode=[pool(1)])
    mixed = make_spec(prefill=[pool(3, **EIGHT), pool(1, "y", gpu="B200")], decode=[pool(1)])

    for each, said in ((spec, "of 8 accelerators"), (mixed, "of 1 or 8 accelerators")):
        (problem,) = see(each, facts_of(each, prefill_x=waiting)).decision.problems
        assert problem.message.startswith(f"B200 is short of 2 workers {said} that no node takes")


def test_both_the_workers_and_the_accelerators_of_an_object_are_limited() -> None:
    pools = [
        Pool(PoolFacts(role, "x", "H100", 0, 0, 0), 0, high=4000) for role in ("prefill", "decode")
    ]

    assert len(WORKERS) > 63  # no type has such a name
    assert Budget.of(BudgetSpec(), [], pools).limits == {WORKERS: MAX_WORKERS}
    spec = BudgetSpec(total=MAX_WORKERS * 8)
    assert Budget.of(spec, [], pools).limits == {ALL: MAX_WORKERS * 8, WORKERS: MAX_WORKERS}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[PDClusterSpec, list[PoolFacts], dict[str, Any]]:
    """Pools of 1, 2, 4 and 8 accelerators a worker within a budget, and what their workers show."""
    roles = {}
    for role in ("prefill", "decode"):
        found = []
        for index in range(draw(st.integers(1, 3))):
            low = draw(st.integers(0, 1))
            gpu = draw(st.sampled_from(["H100", "B200"]))
            gpus = draw(st.sampled_from([1, 2, 4, 8]))
            size = max(low, draw(st.integers(0 if index else 1, 3)))
            fields = {"gpu": gpu, "gpusPerReplica": gpus, "minReplicas": low}
            found.append(pool(size, f"p{index}", **fields))
        roles[role] = found
    spec = make_spec(**roles)
    has = accelerators(spec, {each.key: each.replicas for each in facts_of(spec)})
    budget: dict[str, Any] = {"total": has.pop("total") + draw(st.integers(0, 20))}
    if draw(st.booleans()):
        budget["perGpu"] = {
            gpu: number + draw(st.integers(0, 9)) for gpu, number in has.items() if number
        }
    ratio = draw(st.sampled_from([{}, {"min": 0.5, "max": 2.0}]))
    spec = make_spec(**roles, budget=budget, ratio=ratio, scaleDown={"windowSeconds": 0})
    facts = [
        replace(each, current=each.current + ends, ending=ends)
        for each in facts_of(spec)
        for ends in (draw(st.integers(0, 1)),)
    ]
    return spec, facts, {role: LOADS[draw(st.sampled_from(sorted(LOADS)))] for role in roles}


@settings(deadline=None, max_examples=200)
@given(world=worlds())
def test_accelerators_stay_within_the_budget_and_minima_are_kept(
    world: tuple[PDClusterSpec, list[PoolFacts], dict[str, Any]],
) -> None:
    """Sizes fit; with pods that end beside them, no more is held than there was."""
    spec, facts, loads = world
    budget = spec.autoscale.budget
    limits = {"total": budget.total, **budget.per_gpu}

    replicas = see(spec, facts, **loads).decision.replicas

    asked = accelerators(spec, replicas)
    held, before = Counter[str](), Counter[str]()
    for each in facts:
        for sums, size in ((held, replicas[each.key]), (before, each.replicas)):
            number = each.held(size).accelerators
            sums[each.gpu] += number
            sums["total"] += number
    for gpu, limit in limits.items():
        assert limit is None or asked[gpu] <= limit, gpu
        assert limit is None or held[gpu] <= max(limit, before[gpu]), gpu
    for role, declared in spec.roles.present().items():
        for each in declared.pools:
            assert replicas[role, each.name] >= (each.min_replicas or 0)
        assert sum(replicas[role, each.name] for each in declared.pools) >= 1


@settings(deadline=None, max_examples=60)
@given(world=worlds())
def test_a_load_that_stays_comes_to_rest(
    world: tuple[PDClusterSpec, list[PoolFacts], dict[str, Any]],
) -> None:
    spec, _, _ = world

    assert settled(spec, prefill=CALM, decode=CALM).changed is False
