"""A rolling roll out on simulated clusters: both revisions serve, old workers go step by step."""

from itertools import groupby

import pytest

from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.plan.clusters import (
    LATER,
    Planned,
    condition_of,
    make_cluster,
    pool,
)
from tests.operator.pdcluster_api.plan.simulated import SimulatedCluster, assert_as_declared


def rolling(
    engine: int = 64,
    *,
    prefill: int = 2,
    decode: int = 2,
    budget: int | None = None,
    routers: int = 0,
) -> PDCluster:
    found = make_cluster(
        prefill=[pool(prefill)],
        decode=[pool(decode)],
        engine=engine,
        strategy="Rolling",
        routers=routers,
    )
    if budget is None:
        return found
    autoscale = found.spec.autoscale
    limit = autoscale.budget.model_copy(update={"total": budget})
    spec = {"autoscale": autoscale.model_copy(update={"budget": limit})}
    return found.model_copy(update={"spec": found.spec.model_copy(update=spec)})


def sizes(existing: SimulatedCluster, revision: str) -> dict[str, int]:
    return {each.role: size for each, size in existing.sets.items() if each.revision == revision}


def ready(existing: SimulatedCluster) -> dict[str, int]:
    """Workers of revisions that the Service leads to."""
    return {
        role: sum(
            pods.ready
            for each, pods in existing.pods.items()
            if each.role == role and (existing.is_wide or each.revision == existing.service)
        )
        for role in ("prefill", "decode")
    }


def walk(existing: SimulatedCluster, cluster: PDCluster, rounds: int = 60) -> list[Planned]:
    """Plans until nothing changes; every observation keeps the floor."""
    plans = []
    for _ in range(rounds):
        before = repr(existing)
        plan = existing.plan(cluster)
        existing.carry_out(plan)
        plans.append(plan)
        for workload in sorted({*existing.sets, *existing.pods}):
            existing.step(workload)
            assert min(ready(existing).values()) >= 2, existing
            assert existing.num_answering(), existing
        if repr(existing) == before:
            return plans
    raise AssertionError(f"no end: {existing}")


def test_two_of_each_roll_within_a_budget_of_one_more() -> None:
    existing, old, new = SimulatedCluster(), rolling(), rolling(65, budget=5)
    existing.settle(old)
    a, b = revision_of(old.spec), revision_of(new.spec)
    started = existing.plan(new)
    assert {each.id.revision for each in started.workloads} == {a, b}
    assert not started.is_wide

    plans = walk(existing, new)

    for plan in plans:
        total = sum(each.replicas for each in plan.workloads)
        assert total <= 5
    assert any(plan.is_wide for plan in plans)
    assert not plans[-1].is_wide
    assert sizes(existing, b) == {"prefill": 2, "decode": 2}
    assert sizes(existing, a) == {}
    assert condition_of(existing.status, "Ready")["status"] == "True"
    assert existing.plan(new, LATER).events == ()
    messages = [condition_of(plan.status, "Ready")["message"] for plan in plans]
    assert list(dict.fromkeys(messages)) == [
        *(
            f"roll out to revision {b}: {step}"
            for step in (
                "step 1 of 2: waits for 1 new decode worker to be ready",
                "step 1 of 2: waits for the Service to lead to both revisions",
                "step 1 of 2: waits for 1 old decode worker to drain",
                "step 1 of 2: waits for 1 new prefill worker to be ready",
                "step 2 of 2: waits for 1 old prefill worker to drain",
                "step 2 of 2: waits for 1 new decode worker to be ready",
                "step 2 of 2: waits for 1 old decode worker to drain",
                "step 2 of 2: waits for 1 new prefill worker to be ready",
            )
        ),
        "prefill 2/2, decode 2/2",
    ]


def test_a_budget_without_room_for_one_worker_holds_it_and_says_so() -> None:
    existing, new = SimulatedCluster(), rolling(65, budget=4)
    existing.settle(rolling())
    before = dict(existing.sets)

    held = existing.settle(new)

    assert {each: size for each, size in existing.sets.items() if size} == before
    lacks = (
        f"the next worker of revision {revision_of(new.spec)} needs 1 cpu more than "
        "autoscale.budget has: raise that, or rollout.maxUnavailable"
    )
    assert condition_of(held.status, "RolloutOverBudget")["message"] == lacks
    assert condition_of(held.status, "Ready")["message"].endswith(f"step 1 of 2: {lacks}")
    assert condition_of(held.status, "Serving")["status"] == "True"


@pytest.mark.parametrize(("before", "after"), [((1, 0), (1, 0)), ((1, 2), (0, 0))])
def test_it_ends_where_no_worker_is_to_answer(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    old, new = (
        make_cluster(
            prefill=[pool(prefill)], decode=[pool(decode)], engine=engine, strategy="Rolling"
        )
        for engine, (prefill, decode) in ((64, before), (65, after))
    )
    existing = SimulatedCluster()
    existing.settle(old)

    existing.settle(new)

    assert_as_declared(existing, new)


@pytest.mark.parametrize("engine", [65, 66], ids=["goes-on", "another-revision"])
@pytest.mark.parametrize("rounds", range(0, 16, 3))
def test_routers_that_come_in_the_middle_take_no_worker_away(rounds: int, engine: int) -> None:
    existing = SimulatedCluster()
    existing.settle(rolling())
    for _ in range(rounds):
        existing.carry_out(existing.plan(rolling(65)))
        for workload in sorted({*existing.sets, *existing.pods}):
            existing.step(workload)
    two = [pool(2)]
    routed = make_cluster(prefill=two, decode=two, engine=engine, routers=1)

    for plan in walk(existing, routed):
        assert not plan.is_wide or plan.serving_role == "decode", plan
    assert_as_declared(existing, routed)


def test_decode_workers_answer_from_the_first_step_of_a_cluster_with_routers_to_the_last() -> None:
    existing, old, new = SimulatedCluster(), rolling(routers=2), rolling(65, budget=5, routers=2)
    existing.settle(old)
    a, b = revision_of(old.spec), revision_of(new.spec)
    assert existing.service_role == "router"

    plans = walk(existing, new)

    led = [(plan.serving_role, plan.is_wide) for plan in plans]
    assert [each for each, _ in groupby(led)] == [
        ("router", False),
        ("decode", True),
        ("decode", False),
        ("router", False),
    ]
    assert sizes(existing, a) == {}
    assert sizes(existing, b) == {"prefill": 2, "decode": 2, "router": 2}
    assert_as_declared(existing, new)


@pytest.mark.parametrize("rounds", range(0, 16, 3))
def test_a_cluster_with_routers_goes_back_in_the_middle(rounds: int) -> None:
    existing, old, new = SimulatedCluster(), rolling(routers=1), rolling(65, routers=1)
    existing.settle(old)
    for _ in range(rounds):
        existing.carry_out(existing.plan(new))
        for workload in sorted({*existing.sets, *existing.pods}):
            existing.step(workload)

    walk(existing, old)

    assert_as_declared(existing, old)


def test_decode_that_shrinks_as_it_begins_gets_the_one_worker_of_a_budget_that_falls() -> None:
    existing, new = SimulatedCluster(), rolling(65, prefill=1, decode=1, budget=3)
    existing.settle(rolling(prefill=1, decode=3))
    existing.generation += 1
    existing.carry_out(existing.plan(rolling(65, prefill=1, decode=1)))

    existing.settle(new)

    assert_as_declared(existing, new)
