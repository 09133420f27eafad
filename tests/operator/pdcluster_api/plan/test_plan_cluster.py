"""Whole plans: workloads, scalers and status of ordinary and odd situations."""

from dataclasses import replace

import pytest

from pdcluster_api.plan.observed.state import DiscoveryState, Observed, ScalerState
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.plan.clusters import (
    NOW,
    condition_of,
    identity,
    make_cluster,
    plan_all,
    pool,
    running,
    workload,
)
from tests.operator.pdcluster_api.plan.simulated import SimulatedCluster

CLUSTER, NEXT = make_cluster(), make_cluster(engine=65)
A, B = revision_of(CLUSTER.spec), revision_of(NEXT.spec)


def sizes(plan):
    return {
        (each.id.role, each.id.pool, each.id.revision): each.replicas for each in plan.workloads
    }


def test_the_first_plan_makes_everything_at_once():
    plan = plan_all(CLUSTER, Observed(1, {}, DiscoveryState(managed=True, desired=1)), NOW)
    assert sizes(plan) == {("prefill", "cpu", A): 1, ("decode", "cpu", A): 2}
    assert (plan.serving, plan.serving_role) == (A, "decode")
    assert [(each.role, each.pool, each.seen, each.request) for each in plan.scalers] == [
        ("prefill", "cpu", 1, 1),
        ("decode", "cpu", 2, 2),
    ]


def test_a_pool_comes_and_goes_without_a_new_revision():
    grown = make_cluster(decode=[pool(2), pool(1, "more")])
    assert sizes(plan_all(grown, running(CLUSTER), NOW)) == {
        ("prefill", "cpu", A): 1,
        ("decode", "cpu", A): 2,
        ("decode", "more", A): 1,
    }
    shrunk = plan_all(CLUSTER, running(grown), NOW)
    assert sizes(shrunk) == {("prefill", "cpu", A): 1, ("decode", "cpu", A): 2}
    assert [scaler.pool for scaler in shrunk.scalers] == ["cpu", "cpu"]


def test_scaling_up_in_a_roll_out_is_for_both_and_scaling_down_waits_for_the_switch():
    scalers = [ScalerState("prefill", "cpu", 0, 1), ScalerState("decode", "cpu", 7, 2)]
    plan = plan_all(NEXT, running(CLUSTER, scalers=scalers), NOW)
    assert sizes(plan) == {
        ("prefill", "cpu", B): 0,
        ("decode", "cpu", B): 7,
        ("prefill", "cpu", A): 1,
        ("decode", "cpu", A): 7,
    }


@pytest.mark.parametrize("by_hand", [1, 9])
def test_what_keeps_serving_is_reverted_when_it_is_scaled_by_hand(by_hand):
    smaller = make_cluster(decode=[pool(1)], engine=65)
    there = SimulatedCluster(broken={revision_of(smaller.spec)})
    there.settle(CLUSTER)
    plan = there.settle(smaller)
    assert plan.status["kept"] == [
        {"name": identity(A).name, "replicas": 2},
        {"name": identity(A, "prefill").name, "replicas": 1},
    ]
    there.sets[identity(A)] = by_hand
    assert sizes(there.settle(smaller))[("decode", "cpu", A)] == 2
    there.broken.clear()
    assert "kept" not in there.settle(smaller).status


RENAMED = make_cluster(decode=[pool(2, "new")])


def test_a_pool_that_is_replaced_stays_until_the_one_in_its_place_is_ready():
    assert revision_of(RENAMED.spec) == A
    there = SimulatedCluster()
    there.settle(CLUSTER)
    old, new = identity(A), identity(A, name="new")
    there.broken.add(A)  # pods that are ready already stay so
    plan = there.settle(RENAMED)
    assert (there.sets[old], there.sets[new], there.pods[old].ready) == (2, 2, 2)
    said = condition_of(plan.status, "DecodeReady")["message"]
    assert said in condition_of(plan.status, "Ready")["message"]
    assert condition_of(plan.status, "Serving")["status"] == "True"
    there.broken.clear()
    assert sizes(there.settle(RENAMED)) == {("prefill", "cpu", A): 1, ("decode", "new", A): 2}


def test_a_pool_that_is_replaced_and_answers_nothing_goes_at_once():
    live = [workload(identity(A, "prefill"), 1), workload(identity(A), 4, ready=0)]
    plan = plan_all(RENAMED, running(CLUSTER, workloads=live), NOW)
    assert sizes(plan) == {("prefill", "cpu", A): 1, ("decode", "new", A): 2}
    live[1] = workload(identity(A), 4, ready=1)
    assert (
        sizes(plan_all(RENAMED, running(CLUSTER, workloads=live), NOW))[("decode", "cpu", A)] == 4
    )


def test_with_recreate_a_pool_that_is_replaced_goes_at_once():
    plan = plan_all(
        make_cluster(decode=[pool(2, "new")], strategy="Recreate"), running(CLUSTER), NOW
    )
    assert sizes(plan) == {("prefill", "cpu", A): 1, ("decode", "new", A): 2}


def test_a_pool_of_a_role_that_is_whole_goes_though_another_role_is_not():
    grown = make_cluster(decode=[pool(2), pool(1, "more")])
    live = [
        each if each.id.role == "decode" else replace(each, ready=0)
        for each in running(grown).workloads
    ]
    plan = plan_all(CLUSTER, running(grown, workloads=live), NOW)
    assert sizes(plan) == {("prefill", "cpu", A): 1, ("decode", "cpu", A): 2}


def test_a_selector_that_was_edited_to_an_unfinished_target_ends_nothing_that_serves():
    status = plan_all(CLUSTER, running(CLUSTER), NOW).status
    both = [
        *running(CLUSTER).workloads,
        workload(identity(B, "prefill"), 1),
        workload(identity(B), 2, ready=1),
    ]
    plan = plan_all(NEXT, running(CLUSTER, workloads=both, status=status, service_revision=B), NOW)
    assert (plan.serving, plan.status["servingRevision"]) == (A, A)
    assert {("prefill", "cpu", A), ("decode", "cpu", A)} <= set(sizes(plan))


def test_a_lost_scaler_is_seeded_from_the_workload_that_serves():
    live = [workload(identity(A, "prefill"), 1), workload(identity(A), 5), workload(identity(B), 3)]
    plan = plan_all(
        NEXT, running(CLUSTER, scalers=[ScalerState("prefill", "cpu", 1, 1)], workloads=live), NOW
    )
    assert next(scaler.request for scaler in plan.scalers if scaler.role == "decode") == 5


def test_a_scaler_that_is_lost_in_mid_drain_keeps_its_request():
    four = make_cluster(decode=(pool(4),))
    asked = [ScalerState("prefill", "cpu", 1, 1), ScalerState("decode", "cpu", 1, 4)]
    # the StatefulSet still has all four
    status = plan_all(four, running(four, scalers=asked), NOW).status
    plan = plan_all(four, running(four, scalers=asked[:1], status=status), NOW)
    assert next(scaler.request for scaler in plan.scalers if scaler.role == "decode") == 1


def test_a_pool_that_is_declared_again_while_it_drains_starts_over():
    both = make_cluster(decode=(pool(2), pool(3, name="b")))
    # which knows of no pool b any more
    status = plan_all(CLUSTER, running(CLUSTER), NOW).status
    left = [*running(CLUSTER).workloads, workload(identity(revision_of(both.spec), name="b"), 1)]
    plan = plan_all(both, running(CLUSTER, workloads=left, status=status), NOW)
    assert next(scaler.request for scaler in plan.scalers if scaler.pool == "b") == 3


def test_a_lost_workload_of_the_serving_revision_comes_back_in_a_roll_out():
    observed = running(
        CLUSTER,
        workloads=[workload(identity(A, "prefill"), 1)],
        records=[identity(A, "prefill"), identity(A)],
    )
    plan = plan_all(NEXT, observed, NOW)
    assert sizes(plan)[("decode", "cpu", A)] == 2
    assert (plan.serving, plan.serving_role) == (A, "decode")


def test_a_lost_workload_of_a_pool_that_is_no_longer_declared_comes_back_with_one_worker():
    observed = running(
        CLUSTER,
        workloads=[workload(identity(A), 2)],
        records=[identity(A), identity(A, name="gone")],
    )
    assert sizes(plan_all(NEXT, observed, NOW))[("decode", "gone", A)] == 1


def test_from_mixed_to_prefill_and_decode_the_old_role_answers_until_the_switch():
    mixed = make_cluster(mixed=[pool(2)])
    plan = plan_all(CLUSTER, running(mixed), NOW)
    assert (plan.serving, plan.serving_role) == (revision_of(mixed.spec), "mixed")
    assert sizes(plan)[("mixed", "cpu", revision_of(mixed.spec))] == 2
    assert {(scaler.role, scaler.pool) for scaler in plan.scalers} == {
        ("prefill", "cpu"),
        ("decode", "cpu"),
    }
    both = [*running(mixed).workloads, *running(CLUSTER).workloads]
    switched = plan_all(CLUSTER, running(mixed, workloads=both), NOW)
    assert (switched.serving, switched.serving_role) == (A, "decode")


def test_a_target_that_is_to_answer_nothing_takes_over_at_once():
    nothing = make_cluster(prefill=[pool(1)], decode=[pool(0)], engine=65)
    scalers = [ScalerState("prefill", "cpu", 1, 1), ScalerState("decode", "cpu", 2, 2)]
    assert plan_all(nothing, running(CLUSTER, scalers=scalers), NOW).serving == B


def test_a_target_does_not_take_over_while_its_workers_cannot_find_each_other():
    both = [*running(CLUSTER).workloads, *running(NEXT).workloads]
    observed = running(
        CLUSTER, workloads=both, discovery=DiscoveryState(managed=True, ready=1, desired=3)
    )
    assert plan_all(NEXT, observed, NOW).serving == A
    assert (
        plan_all(
            NEXT, replace(observed, discovery=DiscoveryState(managed=True, ready=2, desired=3)), NOW
        ).serving
        == B
    )


def test_what_a_blue_green_roll_out_has_begun_stays_when_the_strategy_becomes_recreate():
    begun = [*running(CLUSTER).workloads, workload(identity(B), 2, ready=1)]
    plan = plan_all(
        make_cluster(engine=65, strategy="Recreate"), running(CLUSTER, workloads=begun), NOW
    )
    assert sizes(plan) == {("decode", "cpu", B): 2}
    assert (plan.serving, plan.serving_role) == (B, "decode")


def test_what_recreate_ends_is_seen_until_its_last_pod_has_ended():
    by = {
        strategy: [
            plan_all(make_cluster(engine=65, strategy=strategy), running(before), NOW).ends_first
            for before in (CLUSTER, NEXT)
        ]
        for strategy in ("BlueGreen", "Recreate")
    }
    assert by == {"BlueGreen": [False, False], "Recreate": [True, False]}


def test_while_recreate_waits_the_service_selects_the_role_of_the_old_revision():
    mixed = make_cluster(mixed=[pool(2)])
    plan = plan_all(make_cluster(strategy="Recreate"), running(mixed), NOW)
    assert (plan.serving, plan.serving_role, plan.workloads) == (
        revision_of(mixed.spec),
        "mixed",
        (),
    )


def test_a_stateful_set_that_is_going_counts_for_nothing():
    """Its pods may still be ready for a moment: that neither takes over nor serves."""
    going = [replace(state, gone=True) for state in running(NEXT).workloads]
    rolling = plan_all(NEXT, running(CLUSTER, workloads=[*running(CLUSTER).workloads, *going]), NOW)
    assert rolling.serving == A
    alone = plan_all(
        CLUSTER,
        running(
            CLUSTER, workloads=[replace(state, gone=True) for state in running(CLUSTER).workloads]
        ),
        NOW,
    )
    assert (alone.status["decode"], condition_of(alone.status, "Serving")["status"]) == (
        "0/2",
        "False",
    )
    assert sizes(alone) == {("prefill", "cpu", A): 1, ("decode", "cpu", A): 2}


def walk(there, cluster, limit=60):
    """Every distinct (Service, revisions with StatefulSets) on the way until nothing changes."""
    path = []
    for _ in range(limit):
        before = repr(there)
        there.carry_out(there.plan(cluster))
        state = (there.service, frozenset(each.revision for each in there.sets))
        path += [state] if not path or path[-1] != state else []
        for each in sorted({*there.sets, *there.pods}):
            there.step(each)
        if repr(there) == before:
            return path
    raise AssertionError(f"no end in {limit} passes: {path}")


def test_blue_green_from_end_to_end():
    there = SimulatedCluster()
    there.settle(CLUSTER)
    assert walk(there, NEXT) == [(A, {A, B}), (B, {A, B}), (B, {B})]


def test_recreate_from_end_to_end():
    there = SimulatedCluster()
    there.settle(CLUSTER)
    assert walk(there, make_cluster(engine=65, strategy="Recreate")) == [(A, set()), (B, {B})]
