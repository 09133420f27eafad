"""Facts of each pool for the autoscaler."""

from dataclasses import replace

import pytest

from pdcluster_api.plan.autoscale.values import PoolFacts
from pdcluster_api.plan.cluster import requested_sizes
from pdcluster_api.plan.observed.state import Observed, PodState, Problem, ScalerState
from pdcluster_api.plan.sizes import ScrapeState, pool_facts
from pdcluster_schema import conditions
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.plan.clusters import (
    failing_pod,
    identity,
    make_cluster,
    pool,
    running,
    workload,
)
from tests.operator.pods import pod_states

CLUSTER = make_cluster(decode=(pool(4),))
REVISION = revision_of(CLUSTER.spec)
DECODE = identity(REVISION)


def waiting(ordinal: int) -> PodState:
    return failing_pod(DECODE, ordinal, conditions.UNSCHEDULABLE)


def facts(observed: Observed, seen: ScrapeState) -> PoolFacts:
    """Facts of decode; its StatefulSets are read only where there is a budget."""
    (found,) = [
        each
        for each in pool_facts(requested_sizes(CLUSTER, observed), observed, seen)
        if each.role == "decode"
    ]
    return replace(found, holdings=())


def with_pods(*states: PodState, **fields: object) -> Observed:
    made = workload(DECODE, **{"desired": 4, "current": len(states), "pods": states, **fields})
    return running(CLUSTER, workloads=[made])


def scraped(observed: Observed) -> ScrapeState:
    return ScrapeState(
        [pod.name for state in observed.workloads for pod in state.pods if pod.ready]
    )


def test_workers_that_are_ready_and_were_scraped_count() -> None:
    observed = with_pods(*pod_states(DECODE, range(4)))

    found = facts(observed, ScrapeState([f"{DECODE.name}-{ordinal}" for ordinal in range(3)]))
    assert found == PoolFacts(
        "decode", "cpu", "cpu", replicas=4, current=4, ready=3, top=4, unready_top=1
    )


@pytest.mark.parametrize(
    ("ordinals", "top"), [((), 4), ((0,), 3), ((2,), 1), ((3,), 0), ((0, 3), 0)]
)
def test_only_the_highest_without_one_that_is_ready_among_them_can_go_at_no_loss(
    ordinals: tuple[int, ...], top: int
) -> None:
    four = [
        replace(pod, ready=number in ordinals)
        for number, pod in enumerate(pod_states(DECODE, range(4)))
    ]
    observed = with_pods(*four)
    found = facts(observed, scraped(observed))

    assert (found.ready, found.unready_top) == (len(ordinals), top)


def test_pods_above_the_size_and_those_that_terminate_are_on_their_way_out() -> None:
    four = pod_states(DECODE, range(6))
    observed = with_pods(*four[:3], replace(four[3], terminating=True), *four[4:])
    found = facts(observed, scraped(observed))

    assert (found.replicas, found.current, found.ready, found.ending) == (4, 6, 3, 3)
    assert found.leaving == {f"{DECODE.name}-{ordinal}" for ordinal in (3, 4, 5)}


def test_what_a_statefulset_still_asks_for_while_it_waits_for_drains_comes_again() -> None:
    # one of six was lost in the middle of a drain to four
    observed = with_pods(*pod_states(DECODE, range(5)), desired=6)

    assert facts(observed, scraped(observed)).top == 6


@pytest.mark.parametrize(
    ("ordinals", "top"),
    [((), 0), ((3,), 1), ((2, 3), 2), ((1, 3), 1), ((0, 1), 0), ((0, 1, 2, 3), 4)],
    ids=lambda value: str(value),
)
def test_only_the_highest_without_a_gap_are_top(ordinals: tuple[int, ...], top: int) -> None:
    observed = with_pods(
        *(
            waiting(each) if each in ordinals else pod
            for each, pod in enumerate(pod_states(DECODE, range(4)))
        )
    )
    found = facts(
        observed, ScrapeState(waits={f"{DECODE.name}-{each}": 10.0 + each for each in ordinals})
    )

    assert (found.unschedulable, found.unschedulable_top) == (len(ordinals), top)
    assert found.unschedulable_seconds == max((10.0 + each for each in ordinals), default=0.0)


@pytest.mark.parametrize(("number", "fault"), [(3, "quota: no room"), (4, None)])
def test_a_fault_counts_while_pods_are_missing(number: int, fault: str | None) -> None:
    observed = with_pods(
        *pod_states(DECODE, range(number)),
        fault=Problem(conditions.QUOTA_EXCEEDED, "quota: no room"),
    )

    assert facts(observed, ScrapeState()).fault == fault


def test_pods_of_another_revision_hold_accelerators_and_serve_no_load() -> None:
    old = identity("0123abcd")
    observed = running(
        CLUSTER,
        workloads=[
            workload(DECODE, 4, pods=pod_states(DECODE, range(4))),
            workload(old, 2, pods=pod_states(old, range(2))),
        ],
    )

    found = facts(observed, scraped(observed))
    assert (found.current, found.ready, found.ending) == (6, 4, 2)


def in_roll_out(*states: PodState, size: int) -> PoolFacts:
    """Facts of decode, where an older revision keeps as many workers as it has pods, and `size` is
    now asked for.
    """
    old = states[0].workload
    shown = workload(old, len(states), pods=states)
    observed = running(
        CLUSTER,
        workloads=[shown, workload(DECODE, size, ready=0)],
        scalers=[ScalerState("decode", "cpu", size, 4)],
        service_revision=old.revision,
        status={"kept": [{"name": old.name, "replicas": len(states)}]},
    )
    return facts(observed, scraped(observed))


def test_what_another_revision_will_replace_serves_at_the_size_at_which_it_is_kept() -> None:
    for size, ending in ((3, 3), (5, 5), (6, 6)):  # those of the new revision
        found = in_roll_out(*pod_states(identity("0123abcd"), range(5)), size=size)
        assert (found.replicas, found.current, found.ready, found.ending) == (
            size,
            5 + ending,
            5,
            ending,
        )
        assert found.leaving == frozenset()


def test_a_kept_pod_that_no_node_takes_and_no_size_asks_for_any_more_is_no_lack() -> None:
    old = identity("0123abcd")
    found = in_roll_out(
        *pod_states(old, range(4)), failing_pod(old, 4, conditions.UNSCHEDULABLE), size=4
    )
    assert (found.ready, found.unschedulable, found.unschedulable_top) == (4, 0, 0)
    found = in_roll_out(
        *pod_states(old, range(4)), failing_pod(old, 4, conditions.UNSCHEDULABLE), size=5
    )
    assert (found.ready, found.unschedulable, found.unschedulable_top) == (4, 1, 1)


def test_what_was_kept_says_nothing_of_the_declared_revision() -> None:
    observed = with_pods(*pod_states(DECODE, range(6)))
    observed = replace(observed, status={"kept": [{"name": DECODE.name, "replicas": 6}]})
    assert facts(observed, scraped(observed)).ready == 4


def test_a_pool_without_a_workload_has_what_ends() -> None:
    left = workload(DECODE, 0, gone=True, current=2)
    found = facts(running(CLUSTER, workloads=[left]), ScrapeState())

    assert (found.replicas, found.current, found.ready, found.ending) == (4, 2, 0, 2)


def test_a_pool_that_is_no_longer_declared_counts_with_its_type() -> None:
    other = identity(REVISION, name="b200")
    status = {
        "roles": [{"name": "decode", "pools": [{"name": "b200", "gpu": "B200", "desired": 3}]}]
    }
    observed = running(
        CLUSTER, workloads=[workload(other, 3, pods=pod_states(other, range(3)))], status=status
    )
    found = pool_facts(requested_sizes(CLUSTER, observed), observed, ScrapeState())

    assert found[-1] == PoolFacts(
        "decode", "b200 of B200", "B200", replicas=0, current=3, ready=0, ending=3
    )
