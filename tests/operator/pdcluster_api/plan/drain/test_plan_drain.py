"""Bounds of shrinking a StatefulSet: pods, their records in etcd, the time limit."""

from dataclasses import replace
from typing import Any

import pytest

from pdcluster_api.plan.drain.draining import (
    MISSING_RECORD_GRACE_SECONDS,
    Shrink,
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


def named(*ordinals: int) -> tuple[str, ...]:
    return tuple(NAMES[each] for each in ordinals)


def kept(replicas: int, *commanded: int, **fields: tuple[str, ...]) -> Shrink:
    """So many replicas.  commanded: ordinals with a drain command"""
    return Shrink(replicas, frozenset(named(*commanded)), **fields)


def drains(*ordinals: int) -> dict[str, tuple[str, ...]]:
    return {"draining": named(*ordinals)}


UNREADY, STARTED = {"ready": False}, {"ready": False, "started": True}
TWO = (worker(0), worker(1))
TWO_OF_FOUR = existing(*TWO, desired=4)
CRASHED_ONCE = {**STARTED, "problem": ("CrashLooping", "ends with exit status 1")}
DRAINED = worker_records("ready", "ready", "drained", "drained", commanded=(2, 3))
LAST_DRAINED = worker_records("ready", "ready", "ready", "drained", commanded=(3,))
LAST_ENDS = existing(worker(0), worker(1), worker(2), worker(3, terminating=True), desired=3)
OF_OTHERS = WorkerRecords({f"{OF.name}x-3": "ready", f"{OF.name}-3x": "ready"})


def last(state: str | None, **fields: Any) -> WorkerRecords:
    """Three that are ready, and what is known of the highest."""
    return worker_records("ready", "ready", "ready", state, **fields)


SHRINKS: dict[str, tuple[int, WorkloadState, WorkerRecords | None, Shrink]] = {
    "all surplus are commanded first and none goes": (
        *(2, four(), ALL_READY),
        kept(4, 2, 3, **drains(3, 2)),
    ),
    "one that drained without a command gets one before it is believed": (
        *(3, four(), last("drained")),
        kept(4, 3, **drains(3)),
    ),
    "one that is not ready goes": (3, four(**UNREADY), last(None), kept(3)),
    "one that is pending goes": (3, four(ready=False, node=""), last(None), kept(3)),
    "one that starts goes": (3, four(**UNREADY), last("starting"), kept(3)),
    "one that ends goes": (3, four(terminating=True), last("ready"), kept(3)),
    "a missing pod is not waited for": (
        *(2, TWO_OF_FOUR, worker_records("ready", "ready")),
        kept(2),
    ),
    "a pod of which only etcd tells is waited for": (
        *(2, TWO_OF_FOUR, LAST_DRAINED),
        kept(3, 2, 3, **drains(2)),
    ),
    "records of others": (2, TWO_OF_FOUR, OF_OTHERS, kept(2)),
    "one that is not ready and still registered may hold requests": (
        *(3, four(**UNREADY), last("draining", commanded=(3,))),
        kept(4, 3, **drains(3)),
    ),
    "a ready pod without a record is waited for": (
        *(3, four(), last(None)),
        kept(4, 3, **drains(3)),
    ),
    "until it should have registered again": (
        *(3, four(), last(None, mismatched=MISSING_RECORD_GRACE_SECONDS)),
        kept(3),
    ),
    **{
        f"an etcd that comes back empty ends no drain, after {seconds:g} s": (
            *(2, existing(*TWO, worker(2, **STARTED), worker(3, **STARTED))),
            worker_records(requested=seconds),
            kept(4, 2, 3, **drains(3, 2)),
        )
        for seconds in (1.0, 600.0)
    },
    "one that crashed once and drains now may hold requests": (
        *(3, four(**CRASHED_ONCE), AWAY),
        kept(4, 3, unknown=named(3)),
    ),
    **{
        f"etcd {name}: {what}": (wanted, state, known, found)
        for name, known in (("not asked", None), ("away", AWAY))
        for what, wanted, state, found in (
            ("none goes that may serve", 2, four(), kept(4, 2, 3, unknown=named(3, 2))),
            ("nor one that is not ready", 3, four(**UNREADY), kept(4, 3, unknown=named(3))),
            ("a pending one goes", 3, four(ready=False, node=""), kept(3)),
            (
                "one without an image goes",
                3,
                four(ready=False, problem=("ImageNotPulled", "it fails")),
                kept(3),
            ),
        )
    },
    "a scale up takes commands back": (4, four(), DRAINED, kept(4)),
    "as far as it goes": (3, four(), DRAINED, kept(3, 3)),
    "one that ends keeps its command": (3, LAST_ENDS, DRAINED, kept(3, 3)),
    "or it would serve until SIGTERM": (4, LAST_ENDS, DRAINED, kept(4, 3)),
    **{
        f"one about to end keeps it before the watch says so, {name}": (
            4,
            replace(
                existing(*TWO, worker(2), worker(3, **STARTED), desired=desired),
                gone=desired == 4,
            ),
            LAST_DRAINED,
            kept(4, 3),
        )
        for name, desired in (("smaller", 3), ("deleted", 4))
    },
    **{
        f"a size that was lowered by hand to {size} is reverted": (
            *(4, existing(*TWO, desired=size), None),
            kept(4),
        )
        for size in (0, 2, 3)
    },
    "one that was raised by hand, while the new pods are not ready": (
        *(4, existing(*four().pods, worker(4, ready=False), desired=6), ALL_READY),
        kept(4),
    ),
    "a pod of another name is of no pool": (
        *(0, existing(worker(0, name="chat-decode-cpu-r1-x")), worker_records()),
        kept(0),
    ),
}


@pytest.mark.parametrize(("wanted", "state", "known", "found"), SHRINKS.values(), ids=SHRINKS)
def test_shrink(
    wanted: int, state: WorkloadState, known: WorkerRecords | None, found: Shrink
) -> None:
    assert plan_shrink(wanted, state, known, None) == found


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


@pytest.mark.parametrize("known", [ALL_READY, AWAY], ids=["answers", "away"])
def test_a_time_limit_cuts_and_names_the_workers_that_go(known: WorkerRecords):
    late = replace(known, requested=dict.fromkeys(NAMES, 60.0))
    assert plan_shrink(2, four(), late, 61).cut == ()
    assert plan_shrink(2, four(), late, 60) == kept(2, 2, 3, cut=named(3, 2))
    one_late = replace(ALL_READY, requested={NAMES[2]: 60.0})
    assert plan_shrink(2, four(), one_late, 60) == kept(4, 2, 3, **drains(3))


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


def test_an_ending_worker_with_little_time_gets_a_command_and_others_do_not():
    ending = worker(0, ready=False, started=True, terminating=True, grace_seconds=25)
    usual = worker(1, ready=False, started=True, terminating=True)
    left = worker(2, grace_seconds=25)  # it does not end
    state = existing(ending, usual, left)
    for known in (worker_records("ready", "ready", "ready"), AWAY):
        found = plan_drain([Workload(OF, 3)], (), [state], known, None)
        assert (found.graces, found.commands) == ({NAMES[0]: 25}, {NAMES[0]})
    gone = plan_drain(
        [Workload(OF, 3)], (), [existing(worker(0))], worker_records("ready", commanded=(0,)), None
    )
    assert (gone.graces, gone.commands) == ({}, frozenset())


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
    replicas, condition = decode_of(
        WorkerRecords(error="etcd does not answer at x:1 (UNAVAILABLE)")
    )
    assert replicas == 4
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
