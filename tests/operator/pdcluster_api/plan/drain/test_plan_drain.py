"""Bounds of shrinking a StatefulSet: pods, their records in etcd, the time limit."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_api.plan.drain.draining import (
    MISSING_RECORD_GRACE_SECONDS,
    Shrink,
    ordinal_of,
    plan_drain,
    plan_shrink,
)
from pdcluster_api.plan.observed.state import PodState, WorkerRecords, WorkloadState
from pdcluster_api.plan.status.events import cut_short
from pdcluster_schema.workload import Workload
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
from tests.operator.pods import pod_state, pod_states

OF = identity("r1")
NAMES = [f"{OF.name}-{ordinal}" for ordinal in range(12)]


def worker(ordinal: int, **fields: Any) -> PodState:
    return pod_state(OF, ordinal, **{"node": "n1", **fields})


def existing(*pods: PodState, desired: int | None = None) -> WorkloadState:
    return workload(OF, len(pods) if desired is None else desired, pods=pods)


def four(**last: Any) -> WorkloadState:
    """Four ready pods.  last: what is different of the highest."""
    return existing(worker(0), worker(1), worker(2), worker(3, **last))


def worker_records(
    *states: str | None,
    commanded: tuple[int, ...] = (),
    requested: float = 0.0,
    mismatched: float = 0.0,
    error: str | None = None,
) -> WorkerRecords:
    """states: by ordinal, None = no record; commanded: ordinals with a drain command; mismatched:
    of all without a record.
    """
    known = {NAMES[ordinal]: state for ordinal, state in enumerate(states) if state is not None}
    odd_ones = {name: mismatched for name in NAMES if name not in known}
    return WorkerRecords(
        known,
        frozenset(NAMES[each] for each in commanded),
        requested=dict.fromkeys(NAMES, requested),
        mismatched=odd_ones,
        error=error,
    )


ALL_READY = worker_records("ready", "ready", "ready", "ready")
AWAY = worker_records(error="etcd does not answer")


def test_all_surplus_workers_are_commanded_to_drain_first_and_none_goes():
    found = plan_shrink(2, four(), ALL_READY, None)
    assert found == Shrink(4, frozenset(NAMES[2:4]), draining=(NAMES[3], NAMES[2]))


@pytest.mark.parametrize(
    ("states", "replicas"),
    [
        (("ready", "ready", "draining", "drained"), 3),
        (("ready", "ready", "drained", "draining"), 4),  # a StatefulSet removes its highest first
        (("ready", "ready", "drained", "drained"), 2),
        (("ready", "drained", "drained", "drained"), 2),  # never below what is wanted
    ],
)
def test_replicas_follow_the_highest_that_still_drains(states: tuple[str, ...], replicas: int):
    found = plan_shrink(2, four(), worker_records(*states, commanded=(2, 3)), None)
    assert (found.replicas, found.commands) == (replicas, frozenset(NAMES[2:4]))


def test_a_drained_worker_without_a_command_gets_one_before_it_is_believed():
    found = plan_shrink(3, four(), worker_records("ready", "ready", "ready", "drained"), None)
    assert (found.replicas, found.commands) == (4, {NAMES[3]})


@pytest.mark.parametrize(
    ("state", "last"),
    [
        (None, {"ready": False}),
        (None, {"ready": False, "node": ""}),
        ("starting", {"ready": False}),
        ("ready", {"terminating": True}),
    ],
    ids=["not-ready", "pending", "starting", "ending"],
)
def test_a_worker_that_serves_no_request_goes_at_once(state: str | None, last: dict[str, Any]):
    found = plan_shrink(3, four(**last), worker_records("ready", "ready", "ready", state), None)
    assert found == Shrink(3)


def test_a_pod_that_is_missing_is_not_waited_for():
    assert plan_shrink(
        2, existing(worker(0), worker(1), desired=4), worker_records("ready", "ready"), None
    ) == Shrink(2)


def test_a_pod_of_which_only_etcd_tells_is_waited_for():
    found = plan_shrink(
        2,
        existing(worker(0), worker(1), desired=4),
        worker_records("ready", "ready", "ready", "drained", commanded=(3,)),
        None,
    )
    assert found == Shrink(3, frozenset(NAMES[2:4]), draining=(NAMES[2],))
    of_others = WorkerRecords({f"{OF.name}x-3": "ready", f"{OF.name}-3x": "ready"})
    assert plan_shrink(2, existing(worker(0), worker(1), desired=4), of_others, None) == Shrink(2)


def test_a_worker_that_is_not_ready_and_still_registered_may_hold_requests():
    assert (
        plan_shrink(
            3,
            four(ready=False),
            worker_records("ready", "ready", "ready", "draining", commanded=(3,)),
            None,
        ).replicas
        == 4
    )


def test_a_ready_pod_without_a_record_is_waited_for_until_it_should_have_registered_again():
    for mismatched, replicas in ((0.0, 4), (MISSING_RECORD_GRACE_SECONDS, 3)):
        assert (
            plan_shrink(
                3,
                four(),
                worker_records("ready", "ready", "ready", None, mismatched=mismatched),
                None,
            ).replicas
            == replicas
        )


@pytest.mark.parametrize("requested", [1.0, 600.0])
def test_an_etcd_that_comes_back_empty_ends_no_drain(requested: float):
    """Workers that drain say that they are not ready, and have to register again."""
    draining = [worker(ordinal, ready=False, started=True) for ordinal in (2, 3)]
    found = plan_shrink(
        2, existing(worker(0), worker(1), *draining), worker_records(requested=requested), None
    )
    assert found == Shrink(4, frozenset(NAMES[2:4]), draining=(NAMES[3], NAMES[2]))


def test_a_worker_that_crashed_once_and_drains_now_may_hold_requests_while_etcd_is_away():
    drains = {
        "ready": False,
        "started": True,
        "problem": ("CrashLooping", "ends with exit status 1"),
    }
    assert plan_shrink(3, four(**drains), AWAY, None).replicas == 4


@pytest.mark.parametrize("known", [None, AWAY], ids=["not-asked", "away"])
def test_without_an_answer_no_worker_goes_that_may_serve(known: WorkerRecords | None):
    assert plan_shrink(2, four(), known, None) == Shrink(
        4, frozenset(NAMES[2:4]), unknown=(NAMES[3], NAMES[2])
    )
    assert plan_shrink(3, four(ready=False), known, None).replicas == 4
    for last in ({"node": ""}, {"problem": ("ImageNotPulled", "it fails")}):
        assert plan_shrink(3, four(ready=False, **last), known, None) == Shrink(3)


@pytest.mark.parametrize("known", [ALL_READY, AWAY], ids=["answers", "away"])
def test_a_time_limit_cuts_and_names_the_workers(known: WorkerRecords):
    late = replace(known, requested=dict.fromkeys(NAMES, 60.0))
    assert plan_shrink(2, four(), late, 61).cut == ()
    assert plan_shrink(2, four(), late, 60) == Shrink(
        2, frozenset(NAMES[2:4]), cut=(NAMES[3], NAMES[2])
    )


def test_only_workers_that_go_are_cut():
    known = replace(ALL_READY, requested={NAMES[2]: 60.0})
    assert plan_shrink(2, four(), known, 60) == Shrink(
        4, frozenset(NAMES[2:4]), draining=(NAMES[3],)
    )


def test_a_scale_up_takes_commands_back_and_ending_workers_keep_theirs():
    known = worker_records("ready", "ready", "drained", "drained", commanded=(2, 3))
    assert plan_shrink(4, four(), known, None) == Shrink(4)
    assert plan_shrink(3, four(), known, None) == Shrink(3, frozenset(NAMES[3:4]))
    ending = existing(worker(0), worker(1), worker(2), worker(3, terminating=True), desired=3)
    assert plan_shrink(3, ending, known, None) == Shrink(3, frozenset(NAMES[3:4]))
    # it would serve until SIGTERM
    assert plan_shrink(4, ending, known, None) == Shrink(4, frozenset(NAMES[3:4]))


@pytest.mark.parametrize(("desired", "gone"), [(3, False), (4, True)], ids=["smaller", "deleted"])
def test_a_worker_about_to_end_keeps_its_command_before_the_watch_says_that_it_ends(
    desired: int, gone: bool
):
    known = worker_records("ready", "ready", "ready", "drained", commanded=(3,))
    state = replace(
        existing(
            worker(0), worker(1), worker(2), worker(3, ready=False, started=True), desired=desired
        ),
        gone=gone,
    )
    assert plan_shrink(4, state, known, None) == Shrink(4, frozenset(NAMES[3:4]))


@pytest.mark.parametrize("desired", [0, 2, 3])
def test_a_size_that_was_lowered_by_hand_is_reverted_at_once(desired: int):
    assert plan_shrink(4, existing(worker(0), worker(1), desired=desired), None, None) == Shrink(4)


def test_a_size_that_was_raised_by_hand_is_reverted_while_the_new_pods_are_not_ready():
    assert plan_shrink(
        4, existing(*four().pods, worker(4, ready=False), desired=6), ALL_READY, None
    ) == Shrink(4)


def test_pods_of_other_names_belong_to_no_pool():
    strange = worker(0, name="chat-decode-cpu-r1-x")
    assert ordinal_of(strange) == -1
    assert plan_shrink(0, existing(strange), worker_records(), None) == Shrink(0)


def test_a_workload_that_leaves_stays_until_all_have_drained():
    leaving = [four()]
    held = plan_drain((), leaving, leaving, ALL_READY, None)
    assert (held.workloads, held.needs_worker_records) == ((Workload(OF, 4),), True)
    gone = plan_drain(
        (), leaving, leaving, worker_records(*["drained"] * 4, commanded=(0, 1, 2, 3)), None
    )
    assert (gone.workloads, gone.commands) == ((), frozenset(NAMES[:4]))
    ending = [replace(four(), gone=True)]
    assert plan_drain(
        (), (), ending, worker_records(*["drained"] * 4, commanded=(0, 1, 2, 3)), None
    ).commands == frozenset(NAMES[:4])


CRASHES = {"ready": False, "problem": ("CrashLooping", "it ends")}
DRAINS = {"ready": False, "started": True}


@pytest.mark.parametrize(
    ("last", "known"),
    [
        ({}, worker_records(None, "ready")),
        (DRAINS, worker_records(None, "draining", commanded=(1,))),
        (DRAINS, worker_records(None, "drained", commanded=(1,), requested=600.0)),
    ],
    ids=["serves", "drains", "drained"],
)
def test_a_worker_that_serves_alone_gets_no_command_and_is_taken_back(
    last: dict[str, Any], known: WorkerRecords
):
    found = plan_drain(
        [Workload(OF, 1)], (), [existing(worker(0, **CRASHES), worker(1, **last))], known, 60
    )
    assert (found.workloads, found.commands, found.cut) == ((Workload(OF, 2),), frozenset(), ())
    said = (
        "pool cpu: 1 worker keeps serving until one of the role that stays is ready: pod "
        f"{NAMES[1]}"
    )
    assert (found.messages, found.needs_worker_records) == ({"decode": (said,)}, True)


def test_a_worker_that_does_not_know_yet_that_it_serves_again_is_not_relied_on():
    two = [existing(worker(0), worker(1))]
    for known in (
        worker_records("ready", "ready", commanded=(0,)),
        worker_records("draining", "ready"),
    ):
        assert plan_drain([Workload(OF, 1)], (), two, known, None).commands == frozenset()
    assert plan_drain(
        [Workload(OF, 1)], (), two, worker_records("ready", "ready"), None
    ).commands == {NAMES[1]}


def test_a_worker_that_serves_alone_drains_where_another_pool_serves_or_none_is_desired():
    other = identity("r1", name="other")
    ready = workload(other, 1, pods=pod_states(other, [0], node="n1"))
    two, known = existing(worker(0, **CRASHES), worker(1)), worker_records(None, "ready")
    assert plan_drain(
        [Workload(OF, 1), Workload(other, 1)], (), [two, ready], known, None
    ).commands == {NAMES[1]}
    assert plan_drain([Workload(OF, 0)], (), [two], known, None).commands == {NAMES[1]}
    for revision, role in (("r2", "decode"), ("r1", "prefill")):
        others = replace(other, revision=revision, role=role)
        of_others = replace(
            ready,
            id=others,
            pods=(replace(ready.pods[0], name=f"{others.name}-0", workload=others),),
        )
        assert (
            plan_drain(
                [Workload(OF, 1), Workload(others, 1)], (), [two, of_others], known, None
            ).commands
            == frozenset()
        )


def test_no_drain_goes_by_an_old_answer_of_etcd():
    going = [four(ready=False)]  # by what is known, there is nothing to drain
    found = plan_drain(
        [Workload(OF, 3)], (), going, worker_records("ready", "ready", "ready"), None
    )
    assert (found.workloads, found.needs_worker_records) == ((Workload(OF, 3),), True)
    gone = [replace(four(), gone=True)]
    assert not plan_drain([Workload(OF, 3)], (), gone, ALL_READY, None).needs_worker_records


def test_a_command_without_a_worker_is_to_be_taken_back():
    found = plan_drain(
        [Workload(OF, 4)],
        (),
        [four()],
        replace(ALL_READY, commands=frozenset({"no-such-pod"})),
        None,
    )
    assert (found.commands, found.needs_worker_records, found.requeue_after_seconds) == (
        frozenset(),
        True,
        1.0,
    )
    at_rest = plan_drain([Workload(OF, 4)], (), [four()], ALL_READY, None)
    assert (at_rest.needs_worker_records, at_rest.requeue_after_seconds, at_rest.messages) == (
        False,
        None,
        {},
    )


GROWN = make_cluster(decode=(pool(4),))


def decode_of(known: WorkerRecords | None) -> tuple[int, dict[str, Any]]:
    """Replicas and condition of decode when a cluster of four is to have two."""
    cluster, before = make_cluster(decode=(pool(2),)), running(GROWN)
    of = before.workloads[1].id
    pods = pod_states(of, range(4), node="n1")
    if known is not None:
        known = replace(
            known,
            states={each.name: "ready" for each in pods},
            requested=dict.fromkeys((each.name for each in pods), 90.0),
        )
    observed = replace(
        before,
        workloads=(before.workloads[0], replace(before.workloads[1], pods=pods)),
        worker_records=known,
    )
    plan = plan_all(cluster, observed, NOW)
    assert plan.needs_worker_records
    assert len(plan.commands) == 2
    sizes = {workload.id.role: workload.replicas for workload in plan.workloads}
    return sizes["decode"], dict(condition_of(plan.status, "DecodeReady"))


def test_the_condition_names_draining_workers_and_what_holds_them():
    replicas, condition = decode_of(WorkerRecords())
    assert (replicas, condition["status"], condition["reason"]) == (4, "True", "Scaling")
    assert (
        "pool cpu: 2 workers drain before the pool shrinks: pod chat-decode-cpu-"
        in condition["message"]
    )
    assert "(and 1 more)" in condition["message"]
    replicas, condition = decode_of(
        WorkerRecords(error="etcd does not answer at x:1 (UNAVAILABLE)")
    )
    assert replicas == 4
    assert "shrinking is held: etcd does not say whether pod" in condition["message"]
    assert decode_of(None)[0] == 4


def test_what_a_limit_cuts_is_a_warning():
    cluster = GROWN.model_copy(deep=True)
    rollout = cluster.spec.rollout.model_copy(update={"drain_timeout_seconds": 60})
    cluster = cluster.model_copy(
        update={"spec": cluster.spec.model_copy(update={"rollout": rollout})}
    )
    observed = running(
        cluster,
        scalers=[
            replace(each, replicas=min(each.replicas, 3)) for each in running(cluster).scalers
        ],
    )
    of = observed.workloads[1].id
    first, last = pod_states(of, (0, 3))
    known = WorkerRecords({last.name: "draining"}, frozenset({last.name}), {last.name: 60.0})
    observed = replace(
        observed,
        workloads=(observed.workloads[0], replace(observed.workloads[1], pods=(first, last))),
        worker_records=known,
    )
    plan = plan_all(cluster, observed, NOW)
    assert plan.cut == (last.name,)
    assert [(each.reason, each.warning) for each in cut_short(plan.cut)] == [("DrainCut", True)]


STATES = st.sampled_from(["starting", "ready", "draining", "drained", None])


@given(
    size=st.integers(0, 6),
    desired=st.integers(0, 6),
    states=st.lists(STATES, min_size=6, max_size=6),
    commanded=st.sets(st.integers(0, 5)),
    ready=st.lists(st.booleans(), min_size=6, max_size=6),
    started=st.lists(st.booleans(), min_size=6, max_size=6),
    error=st.sampled_from([None, "away"]),
)
def test_no_worker_that_may_hold_a_request_is_ever_cut_without_a_limit(
    size: int,
    desired: int,
    states: list[str | None],
    commanded: set[int],
    ready: list[bool],
    started: list[bool],
    error: str | None,
):
    pods = [
        worker(ordinal, ready=ready[ordinal], started=started[ordinal])
        for ordinal in range(desired)
    ]
    found = plan_shrink(
        size,
        existing(*pods, desired=desired),
        worker_records(*states, commanded=tuple(commanded), error=error),
        None,
    )
    assert found.cut == ()
    assert size <= found.replicas <= max(size, desired)
    for ordinal in range(found.replicas, desired):
        assert error is None
        is_done = states[ordinal] == "drained" and ordinal in commanded
        assert (
            is_done
            or states[ordinal] == "starting"
            or (states[ordinal] is None and not (ready[ordinal] or started[ordinal]))
        )
    assert not any(NAMES[ordinal] in found.commands for ordinal in range(min(size, desired)))
