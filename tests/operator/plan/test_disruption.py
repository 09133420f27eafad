"""Evictions that a drain of nodes may make, as sequences of what is there."""

from dataclasses import replace

import pytest

from pdcluster_operator.api import conditions as words
from pdcluster_operator.api.revision import revision_of
from pdcluster_operator.plan.cluster import plan_cluster
from pdcluster_operator.plan.disruption import min_available
from pdcluster_operator.plan.state import PodState, WorkloadState
from tests.operator.plan.clusters import NOW, identity, make_cluster, running, workload

DECODE = identity("aaaa")
READY, STARTING, ENDING, DRAINING = "ready", "starting", "ending", "draining"
UNPLACED, FAILING, DOWNLOADING = "unplaced", "failing", "downloading"
PROBLEMS = {
    UNPLACED: words.UNSCHEDULABLE,
    FAILING: words.CRASH_LOOPING,
    DOWNLOADING: words.DOWNLOADING_MODEL,
}


def there(*pods: str, desired: int | None = None, fault: tuple[str, str] | None = None) -> WorkloadState:
    states = tuple(
        PodState(
            f"{DECODE.name}-{ordinal}",
            DECODE,
            ready=pod == READY,
            terminating=pod == ENDING,
            problem=(PROBLEMS[pod], "it waits") if pod in PROBLEMS else None,
        )
        for ordinal, pod in enumerate(pods)
    )
    return WorkloadState(
        DECODE,
        desired or len(pods),
        len(pods),
        pods.count(READY),
        len(pods),
        fault=fault,
        pods=states,
    )


def allowed(size: int, *moments: WorkloadState) -> list[int]:
    """By the arithmetic of the disruption controller, after each moment; the budget is all that is remembered."""
    found, budget = [], None
    for state in moments:
        budget = min_available(size, state, (), budget)
        found.append(max(0, sum(pod.ready and not pod.terminating for pod in state.pods) - budget))
    return found


def test_evictions_take_one_worker_at_a_time_until_its_successor_is_ready() -> None:
    whole = there(READY, READY, READY)
    moments = [
        whole,
        there(READY, ENDING, READY),
        there(READY, STARTING, READY),
        there(READY, DOWNLOADING, READY),
        whole,
    ]
    assert allowed(3, *moments) == [1, 0, 0, 0, 1]


@pytest.mark.parametrize("lost", [UNPLACED, FAILING])
def test_a_worker_that_may_never_be_ready_holds_up_nothing(lost: str) -> None:
    moments = [
        there(READY, READY, READY),
        there(READY, ENDING, READY),
        there(READY, lost, READY),
        there(READY, lost, ENDING),
    ]
    assert allowed(3, *moments) == [1, 0, 1, 0]


def test_a_worker_that_fails_again_and_again_holds_up_nothing_between_its_failures() -> None:
    failing, again = there(READY, READY, FAILING), there(READY, READY, STARTING)
    assert allowed(3, there(READY, READY, READY), failing, again, failing) == [1, 1, 1, 1]


def test_a_scale_up_and_a_first_start_hold_up_nothing() -> None:
    grown = there(READY, READY, STARTING, STARTING)
    assert allowed(4, grown, there(READY, READY, READY, STARTING), there(READY, READY, ENDING, STARTING)) == [1, 1, 0]
    assert allowed(2, there(STARTING, STARTING), there(READY, STARTING), there(READY, READY)) == [
        0,
        1,
        1,
    ]


def test_workers_that_cannot_be_created_hold_up_nothing() -> None:
    refused = there(READY, READY, desired=4, fault=(words.QUOTA_EXCEEDED, "no room"))
    assert allowed(4, there(READY, READY, READY, READY), refused) == [1, 1]


def test_those_that_drain_count_beside_the_one() -> None:
    state = there(READY, DRAINING, DRAINING)
    assert min_available(3, state, {f"{DECODE.name}-1", f"{DECODE.name}-2"}, 2) == 0


def test_those_beyond_the_size_count_for_nothing() -> None:
    assert min_available(2, there(READY, READY, READY), (), 2) == 1


def test_without_a_stateful_set_nothing_is_to_stay() -> None:
    assert min_available(3, None, (), None) == 0


def test_an_edited_budget_asks_for_no_more_than_there_are() -> None:
    assert min_available(2, there(READY, READY), (), 99) == 1


CLUSTER, NEXT = make_cluster(), make_cluster(engine=65)
A, B = revision_of(CLUSTER.spec), revision_of(NEXT.spec)


def test_during_a_roll_out_only_what_serves_has_budgets() -> None:
    beside = [workload(identity(B), 2, ready=0), workload(identity(B, "prefill"), 1, ready=0)]
    observed = running(CLUSTER)
    plan = plan_cluster(NEXT, running(CLUSTER, workloads=[*observed.workloads, *beside]), NOW)
    assert plan.serving == A
    assert set(plan.budgets) == {identity(A), identity(A, "prefill")}


def with_pods(state: WorkloadState) -> WorkloadState:
    names = [f"{state.id.name}-{ordinal}" for ordinal in range(state.ready)]
    return replace(state, pods=tuple(PodState(name, state.id, ready=True, terminating=False) for name in names))


def test_with_the_switch_the_new_revision_has_them_and_the_old_one_until_the_service_is_written() -> None:
    before, after = ({identity(each), identity(each, "prefill")} for each in (A, B))
    both = [with_pods(each) for each in (*running(CLUSTER).workloads, *running(NEXT).workloads)]
    status: dict[str, object] = {}
    for _ in range(3):  # the write is refused, or somebody turns the Service back
        plan = plan_cluster(NEXT, running(CLUSTER, workloads=both, status=status), NOW)
        assert (plan.serving, set(plan.budgets)) == (B, before | after)
        assert plan.budgets[identity(A)] == plan.budgets[identity(B)] == 1
        status = dict(plan.status)
    plan = plan_cluster(NEXT, running(NEXT, workloads=both, status=status), NOW)
    assert (plan.serving, set(plan.budgets)) == (B, after)
