"""Evictions that a drain of nodes may make, as sequences of what is there."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from pdcluster_api.plan.drain.disruption import (
    PROBLEM_SECONDS,
    UNREADY_SECONDS,
    ReadinessDeadline,
    min_available,
    plan_budgets,
)
from pdcluster_api.plan.observed.pools import ENDING_SECONDS
from pdcluster_api.plan.observed.state import PodState, Problem, WorkloadState
from pdcluster_schema import conditions as words
from pdcluster_schema.revision import revision_of
from pdcluster_schema.workload import Workload
from tests.operator.pdcluster_api.plan.clusters import (
    NOW,
    identity,
    make_cluster,
    plan_all,
    running,
    workload,
)
from tests.operator.pods import pod_state, pod_states

DECODE = identity("aaaa")
PATIENCE = ReadinessDeadline(NOW, 3600)
READY, STARTING, ENDING, DRAINING = "ready", "starting", "ending", "draining"
UNPLACED, FAILING, DOWNLOADING = "unplaced", "failing", "downloading"
PROBLEMS = {
    UNPLACED: words.UNSCHEDULABLE,
    FAILING: words.CRASH_LOOPING,
    DOWNLOADING: words.DOWNLOADING_MODEL,
}


def existing(
    *pods: str, desired: int | None = None, fault: Problem | None = None, age: float = 0.0
) -> WorkloadState:
    """age: seconds for which those that are not ready have not been, or should have been gone"""
    states = tuple(pod_of(ordinal, pod, before(age)) for ordinal, pod in enumerate(pods))
    return WorkloadState(
        DECODE,
        desired or len(pods),
        len(pods),
        pods.count(READY),
        len(pods),
        fault=fault,
        pods=states,
    )


def pod_of(ordinal: int, how: str, since: str) -> PodState:
    return pod_state(
        DECODE,
        ordinal,
        ready=how == READY,
        terminating=how == ENDING,
        problem=Problem(PROBLEMS[how], "it waits") if how in PROBLEMS else None,
        since=None if how == READY else since,
    )


def before(seconds: float) -> str:
    return (datetime.fromisoformat(NOW) - timedelta(seconds=seconds)).isoformat()


def budget_of(
    size: int, state: WorkloadState, known: int | None, patience: ReadinessDeadline = PATIENCE
) -> int:
    budgets = {} if known is None else {DECODE.name: known}
    return plan_budgets([Workload(DECODE, size)], [state], (), budgets, patience)[DECODE]


def num_allowed(state: WorkloadState, budget: int) -> int:
    """By the arithmetic of the disruption controller."""
    return max(0, sum(pod.ready and not pod.terminating for pod in state.pods) - budget)


def allowed(size: int, *moments: WorkloadState) -> list[int]:
    """After each moment; the budget is all that is remembered."""
    found, budget = [], None
    for state in moments:
        budget = budget_of(size, state, budget)
        found.append(num_allowed(state, budget))
    return found


def test_evictions_take_one_worker_at_a_time_until_its_successor_is_ready() -> None:
    whole = existing(READY, READY, READY)
    moments = [
        whole,
        existing(READY, ENDING, READY),
        existing(READY, STARTING, READY),
        existing(READY, DOWNLOADING, READY),
        whole,
    ]
    assert allowed(3, *moments) == [1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("lost", "seconds"),
    [
        (UNPLACED, PROBLEM_SECONDS),
        (FAILING, PROBLEM_SECONDS),
        (STARTING, UNREADY_SECONDS),
        (DOWNLOADING, UNREADY_SECONDS),
        (ENDING, ENDING_SECONDS),
    ],
)
def test_a_worker_is_waited_for_so_long_and_no_longer(lost: str, seconds: float) -> None:
    moments = [
        existing(READY, READY, READY),
        existing(READY, lost, READY, age=seconds - 1),
        existing(READY, lost, READY, age=seconds),
        existing(READY, lost, lost),
    ]
    assert allowed(3, *moments) == [1, 0, 1, 0]


def test_a_deadline_of_the_spec_that_is_shorter_counts_but_for_an_end() -> None:
    impatient = ReadinessDeadline(NOW, 30)
    pods = [pod_of(0, how, before(29)) for how in (UNPLACED, STARTING, ENDING)]
    assert [impatient.seconds_left(pod) for pod in pods] == [1, 1, ENDING_SECONDS - 29]


def test_a_worker_without_a_start_time_is_waited_for() -> None:
    pod = replace(pod_of(0, STARTING, NOW), since=None)
    assert PATIENCE.seconds_left(pod) is None


@pytest.mark.parametrize("stuck", [ENDING, STARTING], ids=["on a lost node", "without its volume"])
def test_workers_that_neither_end_nor_become_ready_do_not_freeze_a_drain(stuck: str) -> None:
    state = existing(*[READY] * 6, stuck, stuck, age=3600)
    assert num_allowed(state, budget_of(8, state, 7)) == 1


def test_a_worker_that_fails_again_and_again_holds_up_nothing_between_its_failures() -> None:
    failing, again = (
        existing(READY, READY, FAILING, age=900),
        existing(READY, READY, STARTING, age=905),
    )
    assert allowed(3, existing(READY, READY, READY), failing, again, failing) == [1, 1, 1, 1]


def test_a_scale_up_and_a_first_start_hold_up_nothing() -> None:
    grown = existing(READY, READY, STARTING, STARTING)
    assert allowed(
        4, grown, existing(READY, READY, READY, STARTING), existing(READY, READY, ENDING, STARTING)
    ) == [1, 1, 0]
    assert allowed(
        2, existing(STARTING, STARTING), existing(READY, STARTING), existing(READY, READY)
    ) == [
        0,
        1,
        1,
    ]


def test_workers_that_cannot_be_created_hold_up_nothing() -> None:
    refused = existing(READY, READY, desired=4, fault=Problem(words.QUOTA_EXCEEDED, "no room"))
    assert allowed(4, existing(READY, READY, READY, READY), refused) == [1, 1]


def test_draining_workers_may_go_with_the_one() -> None:
    state = existing(READY, DRAINING, DRAINING)
    assert min_available(3, state, {f"{DECODE.name}-1", f"{DECODE.name}-2"}, 2) == 0


def test_those_beyond_the_size_count_for_nothing() -> None:
    assert min_available(2, existing(READY, READY, READY), (), 2) == 1


def test_without_a_stateful_set_nothing_is_to_stay() -> None:
    assert min_available(3, None, (), None) == 0


def test_an_edited_budget_asks_for_no_more_than_there_are() -> None:
    assert min_available(2, existing(READY, READY), (), 99) == 1


CLUSTER, NEXT = make_cluster(), make_cluster(engine=65)
A, B = revision_of(CLUSTER.spec), revision_of(NEXT.spec)


def test_during_a_roll_out_only_what_serves_has_budgets() -> None:
    beside = [workload(identity(B), 2, ready=0), workload(identity(B, "prefill"), 1, ready=0)]
    observed = running(CLUSTER)
    plan = plan_all(NEXT, running(CLUSTER, workloads=[*observed.workloads, *beside]), NOW)
    assert plan.serving == A
    assert set(plan.budgets) == {identity(A), identity(A, "prefill")}


def with_pods(state: WorkloadState) -> WorkloadState:
    return replace(state, pods=pod_states(state.id, range(state.ready)))


def test_the_old_revision_has_them_too_until_the_service_is_written() -> None:
    before, after = ({identity(each), identity(each, "prefill")} for each in (A, B))
    both = [with_pods(each) for each in (*running(CLUSTER).workloads, *running(NEXT).workloads)]
    status: dict[str, object] = {}
    for _ in range(3):  # the write is refused, or another writer turns the Service back
        plan = plan_all(NEXT, running(CLUSTER, workloads=both, status=status), NOW)
        assert (plan.serving, set(plan.budgets)) == (B, before | after)
        assert plan.budgets[identity(A)] == plan.budgets[identity(B)] == 1
        status = dict(plan.status)
    plan = plan_all(NEXT, running(NEXT, workloads=both, status=status), NOW)
    assert (plan.serving, set(plan.budgets)) == (B, after)


def test_a_budget_is_looked_at_again_when_time_alone_will_change_it() -> None:
    starting = tuple(
        pod_state(identity(A), ordinal, ready=False, since=before(age))
        for ordinal, age in enumerate((100, UNREADY_SECONDS + 1))
    )
    others = [each for each in running(CLUSTER).workloads if each.id != identity(A)]
    seen = running(CLUSTER, workloads=[workload(identity(A), 2, ready=0, pods=starting), *others])
    assert plan_all(CLUSTER, seen, NOW).requeue_after_seconds == UNREADY_SECONDS - 100
    ready = tuple(replace(pod, ready=True, since=None) for pod in starting)
    whole = running(CLUSTER, workloads=[workload(identity(A), 2, pods=ready), *others])
    assert plan_all(CLUSTER, whole, NOW).requeue_after_seconds is None
