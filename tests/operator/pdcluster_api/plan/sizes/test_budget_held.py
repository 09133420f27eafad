"""The budget counts what the pods of every StatefulSet hold, in a roll out of both revisions, and
what growth adds to each.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.values import Holding, Outcome
from pdcluster_api.plan.cluster import requested_sizes
from pdcluster_api.plan.observed.pools import ending_of
from pdcluster_api.plan.observed.state import Observed, WorkloadState
from pdcluster_api.plan.sizes import ScrapeState, held_by_type, pool_facts
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.plan.autoscale.worlds import CALM, reasons, rules_of, see
from tests.operator.pdcluster_api.plan.clusters import (
    NOW,
    identity,
    make_cluster,
    plan_all,
    pool,
    running,
    workload,
)
from tests.operator.pods import pod_states

OLD = "0123abcd"
PREFILL, DECODE = ("prefill", "cpu"), ("decode", "cpu")
HUNGRY = replace(CALM, engine_busy_ratio=0.95)
CROWDED = replace(CALM, num_requests_waiting=30.0)  # asks for twice the workers


def budgeted(
    strategy: str = "BlueGreen", decode: Sequence[Mapping[str, Any]] = (pool(2),), **budget: Any
) -> PDCluster:
    """One prefill worker and two decode workers, scaled by metrics."""
    cluster = make_cluster(strategy=strategy, decode=decode)
    autoscale = AutoscaleSpec.model_validate({"mode": "On", "budget": budget})
    return cluster.model_copy(
        update={"spec": cluster.spec.model_copy(update={"autoscale": autoscale})}
    )


def of_size(
    revision: str, place: tuple[str, str], size: int, *, ready: bool = True
) -> WorkloadState:
    of = identity(revision, *place)
    return workload(of, size, size if ready else 0, pods=pod_states(of, range(size), ready=ready))


def left(revision: str, place: tuple[str, str], *ordinals: int) -> WorkloadState:
    """Pods that end, whose StatefulSet is gone."""
    of = identity(revision, *place)
    return workload(
        of,
        0,
        0,
        gone=True,
        current=len(ordinals),
        pods=pod_states(of, ordinals, ready=False, terminating=True),
    )


def old_serves(
    cluster: PDCluster, *beside: WorkloadState, decode: int = 2, **fields: Any
) -> Observed:
    """One prefill worker of the old revision and its decode workers serve."""
    old = [of_size(OLD, PREFILL, 1), of_size(OLD, DECODE, decode)]
    return running(cluster, **{"workloads": [*old, *beside], "service_revision": OLD, **fields})


def new_starts(
    cluster: PDCluster, prefill: int = 1, decode: int = 2
) -> tuple[WorkloadState, WorkloadState]:
    target = revision_of(cluster.spec)
    return of_size(target, PREFILL, prefill, ready=False), of_size(
        target, DECODE, decode, ready=False
    )


def outcome_of(cluster: PDCluster, observed: Observed, **workers: Any) -> Outcome:
    pods = [pod.name for state in observed.workloads for pod in state.pods]
    seen = ScrapeState(pods, lost=ending_of(observed, NOW).lost)
    return see(
        cluster.spec,
        pool_facts(requested_sizes(cluster, observed), observed, seen),
        **(workers or {"decode": CROWDED}),
    )


def sizes_after(cluster: PDCluster, observed: Observed, outcome: Outcome) -> dict[str, list[int]]:
    """Replicas of all StatefulSets that follow the decision, by role."""
    replicas = [
        {"role": role, "pool": name, "replicas": size}
        for (role, name), size in outcome.decision.replicas.items()
    ]
    status = {**observed.status, "autoscaling": {"mode": "On", "replicas": replicas}}
    plan = plan_all(cluster, replace(observed, status=status), NOW)
    return {
        role: sorted(each.replicas for each in plan.workloads if each.id.role == role)
        for role in ("prefill", "decode")
    }


@pytest.mark.parametrize(("total", "decode"), [(6, 2), (7, 2), (8, 3), (9, 3), (10, 4), (20, 4)])
def test_growth_is_for_both_revisions_and_has_to_fit_with_what_they_hold(
    total: int, decode: int
) -> None:
    cluster = budgeted(total=total)
    observed = old_serves(cluster, *new_starts(cluster))  # six workers
    outcome = outcome_of(cluster, observed)

    assert outcome.decision.replicas == {PREFILL: 1, DECODE: decode}
    assert sizes_after(cluster, observed, outcome) == {
        "prefill": [1, 1],
        "decode": [decode, decode],
    }


def test_workers_of_the_new_revision_count_before_its_statefulsets_are_made() -> None:
    cluster = budgeted(total=8)
    for beside in ((), new_starts(cluster, 0, 0)):
        outcome = outcome_of(cluster, old_serves(cluster, *beside))
        assert outcome.decision.replicas == {PREFILL: 1, DECODE: 3}


def test_what_a_roll_out_holds_beyond_the_budget_grows_no_more_and_says_why() -> None:
    cluster = budgeted(total=4)
    outcome = outcome_of(cluster, old_serves(cluster, *new_starts(cluster)))

    assert outcome.changed is False
    assert rules.BUDGET in rules_of(outcome, "decode")
    assert reasons(outcome) == ["ScalingLimited"]


def test_a_type_is_counted_in_both_revisions_and_another_pool_takes_over() -> None:
    cluster = budgeted(
        decode=[pool(2, gpu="H100"), pool(0, "more", gpu="B200")], perGpu={"H100": 5}
    )
    target = revision_of(cluster.spec)
    more = [of_size(revision, ("decode", "more"), 0) for revision in (OLD, target)]
    outcome = outcome_of(cluster, old_serves(cluster, *new_starts(cluster), *more))

    assert outcome.decision.replicas == {PREFILL: 1, DECODE: 2, ("decode", "more"): 2}


def test_a_pool_that_only_the_new_revision_has_grows_by_one_for_each_worker() -> None:
    cluster = budgeted(total=5)
    target = revision_of(cluster.spec)
    new = [of_size(target, PREFILL, 1), of_size(target, DECODE, 2)]
    observed = running(cluster, workloads=[of_size(OLD, PREFILL, 1), *new], service_revision=OLD)

    assert outcome_of(cluster, observed).decision.replicas == {PREFILL: 1, DECODE: 3}


def test_pods_of_the_old_revision_that_end_after_the_switch_make_no_room() -> None:
    cluster = budgeted(total=6)
    target = revision_of(cluster.spec)
    ending = left(OLD, DECODE, 0, 1)
    observed = running(
        cluster, workloads=[of_size(target, PREFILL, 1), of_size(target, DECODE, 2), ending]
    )

    assert outcome_of(cluster, observed).decision.replicas == {PREFILL: 1, DECODE: 3}
    gone = replace(observed, workloads=observed.workloads[:2])
    assert outcome_of(cluster, gone).decision.replicas == {PREFILL: 1, DECODE: 4}


def test_a_pool_that_only_the_old_revision_has_counts_with_the_worker_that_it_lost() -> None:
    cluster = budgeted(total=11)
    of = identity(OLD, "decode", "before")
    before = workload(of, 3, 2, current=2, pods=pod_states(of, (0, 2)))
    status = {
        "roles": [{"name": "decode", "pools": [{"name": "before", "gpu": "cpu", "desired": 3}]}]
    }
    observed = old_serves(cluster, *new_starts(cluster), before, status=status)

    assert outcome_of(cluster, observed).decision.replicas == {PREFILL: 1, DECODE: 3}


def test_a_pool_that_was_larger_before_grows_at_first_in_the_new_revision_alone() -> None:
    cluster = budgeted(total=9)
    kept = {"kept": [{"name": identity(OLD, *DECODE).name, "replicas": 4}]}
    observed = old_serves(cluster, *new_starts(cluster), decode=4, status=kept)  # eight workers
    outcome = outcome_of(cluster, observed)

    assert outcome.decision.replicas == {PREFILL: 1, DECODE: 3}
    assert sizes_after(cluster, observed, outcome) == {"prefill": [1, 1], "decode": [3, 4]}


@pytest.mark.parametrize("gpu", ["H100", ""])
def test_a_pool_that_is_no_longer_declared_counts_once_and_by_the_type_of_its_record(
    gpu: str,
) -> None:
    cluster = budgeted(decode=[pool(2), pool(0, "more", gpu="H100")], total=7, perGpu={"H100": 4})
    target = revision_of(cluster.spec)
    before = replace(of_size(target, ("decode", "before"), 3), gpu=gpu)
    observed = running(
        cluster, workloads=[of_size(target, PREFILL, 1), of_size(target, DECODE, 2), before]
    )

    assert outcome_of(cluster, observed).decision.replicas == {
        PREFILL: 1,
        DECODE: 3,
        ("decode", "more"): 0,
    }
    bounded = budgeted(
        decode=[pool(2, maxReplicas=2), pool(0, "more", gpu="H100")], total=9, perGpu={"H100": 4}
    )
    assert outcome_of(bounded, observed).decision.replicas[("decode", "more")] == (1 if gpu else 2)


def test_pods_of_a_pool_that_came_back_with_another_type_count_by_theirs() -> None:
    first, more = pool(1, gpu="B200", maxReplicas=1), pool(2, "more", gpu="H100")
    cluster = budgeted(decode=[first, more], perGpu={"H100": 5})
    target = revision_of(cluster.spec)
    before = replace(of_size(target, DECODE, 3), gone=True, gpu="H100")
    others = [of_size(target, PREFILL, 1), of_size(target, ("decode", "more"), 2)]
    observed = running(cluster, workloads=[*others, before])

    assert (
        outcome_of(cluster, observed, decode_more=CROWDED).decision.replicas[("decode", "more")]
        == 2
    )
    facts = {
        each.pool: each
        for each in pool_facts(requested_sizes(cluster, observed), observed, ScrapeState())
        if each.role == "decode"
    }
    # the one that comes in their place
    assert [each.held(1) for each in facts["cpu"].holdings] == [1]
    assert (facts["cpu of H100"].gpu, facts["cpu of H100"].current) == ("H100", 3)


def test_what_leaves_counts_at_the_size_to_which_it_is_reverted() -> None:
    cluster = budgeted(decode=[pool(1)], total=7)
    target = revision_of(cluster.spec)
    before = of_size(target, ("decode", "before"), 1)
    status = {"kept": [{"name": before.id.name, "replicas": 4}]}
    starting = [of_size(target, PREFILL, 1), of_size(target, DECODE, 1, ready=False)]
    observed = running(cluster, workloads=[*starting, before], status=status)
    facts = pool_facts(requested_sizes(cluster, observed), observed, ScrapeState())

    assert [each.current for each in facts if each.pool.startswith("before")] == [4]


def with_one_on_a_lost_node(cluster: PDCluster, since: str | None) -> Observed:
    """A prefill worker and two decode workers, the first of which should have ended then."""
    target = revision_of(cluster.spec)
    of = identity(target, *DECODE)
    ending = pod_states(of, [0], ready=False, terminating=True, node="n1", since=since)
    decode = workload(of, 2, 1, current=2, pods=(*ending, *pod_states(of, [1])))
    return running(cluster, workloads=[of_size(target, PREFILL, 1), decode])


@pytest.mark.parametrize(
    ("since", "decode"),
    [(NOW, 2), (None, 2), ("2026-01-01T00:00:00Z", 3)],
    ids=["still ends", "unknown", "lost"],
)
def test_the_room_of_a_worker_on_a_lost_node_is_for_another_one(
    since: str | None, decode: int
) -> None:
    cluster = budgeted(total=3)
    observed = with_one_on_a_lost_node(cluster, since)

    assert outcome_of(cluster, observed).decision.replicas == {PREFILL: 1, DECODE: decode}


def test_a_worker_that_comes_back_from_a_lost_node_takes_its_room_again() -> None:
    cluster = budgeted(total=3)
    target = revision_of(cluster.spec)
    back = running(cluster, workloads=[of_size(target, PREFILL, 1), of_size(target, DECODE, 3)])

    assert outcome_of(cluster, back).decision.replicas == {PREFILL: 1, DECODE: 2}


def test_with_recreate_what_ends_first_makes_room() -> None:
    cluster = budgeted("Recreate", total=4)
    crowded = outcome_of(cluster, old_serves(cluster))
    assert crowded.decision.replicas == {PREFILL: 1, DECODE: 3}
    # the old ends, and then three are made
    assert sizes_after(cluster, old_serves(cluster), crowded) == {"prefill": [], "decode": []}


@pytest.mark.parametrize(
    ("holding", "held"),
    [
        (Holding(3, top=3, ordinals=(0, 1, 2), grows=True), [3, 3, 4, 5]),
        (Holding(0, top=2, ordinals=(), grows=True), [2, 3, 4, 5]),
        (Holding(3, top=2, ordinals=(0, 1, 4), grows=True), [3, 4, 5, 5]),  # one of five still ends
        (Holding(2, top=0, ordinals=(0, 1), grows=False), [2, 2, 2, 2]),
        # it stays, and what it lost comes again
        (Holding(1, top=3, ordinals=(0,), grows=False), [3, 3, 3, 3]),
        # a lost one keeps its place, where none of its accelerators is
        (Holding(2, top=3, ordinals=(0, 1), grows=True, lost=(2,)), [2, 2, 3, 4]),
        (Holding(2, top=1, ordinals=(0, 1), grows=True, lost=(4,)), [2, 3, 4, 4]),
        # two pods that are not known yet
        (Holding(4, top=2, ordinals=(0, 1), grows=True), [4, 4, 4, 5]),
        # one with a name that is none of a worker's
        (Holding(3, top=2, ordinals=(-1, 0, 1), grows=True), [3, 4, 5, 6]),
    ],
)
def test_what_one_statefulset_holds_at_sizes_from_two_on(holding: Holding, held: list[int]) -> None:
    assert [holding.held(size) for size in range(2, 6)] == held


def test_workers_of_three_revisions_count() -> None:
    cluster = budgeted(total=9)
    between = left("deadbeef", DECODE, 0)
    observed = old_serves(cluster, *new_starts(cluster), between)  # seven workers
    assert outcome_of(cluster, observed).decision.replicas == {PREFILL: 1, DECODE: 3}

    facts = pool_facts(requested_sizes(cluster, observed), observed, ScrapeState())
    grown = Counter(each.grows for pool in facts for each in pool.holdings)
    assert grown == {True: 4, False: 1}


TWO = {"gpu": "B200", "gpusPerReplica": 2}


def test_each_revision_holds_the_accelerators_that_its_workers_have() -> None:
    """Eight each before, two each now."""
    cluster = budgeted(decode=[pool(2, **TWO)], total=30)
    old = replace(of_size(OLD, DECODE, 2), gpu="B200", gpus_per_replica=8)
    new = replace(new_starts(cluster)[1], gpu="B200", gpus_per_replica=2)
    prefill = [of_size(OLD, PREFILL, 1), new_starts(cluster)[0]]
    observed = running(cluster, workloads=[*prefill, old, new], service_revision=OLD)
    facts = pool_facts(requested_sizes(cluster, observed), observed, ScrapeState())

    assert held_by_type(facts) == {"cpu": 2, "B200": 16 + 4}
    # another one of each revision: ten more, and only eight are free
    assert outcome_of(cluster, observed).decision.replicas[DECODE] == 2
    assert outcome_of(cluster, observed, prefill=HUNGRY).decision.replicas[PREFILL] == 2


def test_workers_of_pools_that_are_gone_count_by_the_numbers_that_they_had() -> None:
    cluster = budgeted(total=50)
    target = revision_of(cluster.spec)
    several = [
        replace(of_size(revision, ("decode", "before"), 1), gpu="B200", gpus_per_replica=number)
        for revision, number in ((OLD, 8), (target, 4), ("deadbeef", 8))
    ]
    observed = running(
        cluster, workloads=[of_size(target, PREFILL, 1), of_size(target, DECODE, 2), *several]
    )
    facts = pool_facts(requested_sizes(cluster, observed), observed, ScrapeState())

    assert held_by_type(facts) == {"cpu": 3, "B200": 20}
    numbers = [(each.current, each.gpus_per_replica) for each in facts if each.gpu == "B200"]
    assert numbers == [(1, 4), (2, 8)]
