"""Conditions over time and under odd inputs; their reasons and messages by situation are in
tests/golden/operator.
"""

from dataclasses import replace

import pytest

from pdcluster_api.plan.observed.state import ScalerState, WorkerDevice, WorkerRecords, WriteFailure
from pdcluster_api.plan.status.condition import MAX_MESSAGE
from pdcluster_schema import conditions as words
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.plan.clusters import (
    ETCD_READY,
    LATER,
    NOW,
    condition_of,
    failing_pod,
    identity,
    make_cluster,
    plan_all,
    pool,
    running,
    workload,
)
from tests.operator.pods import pod_state

CLUSTER = make_cluster()
REVISION = revision_of(CLUSTER.spec)
PREFILL, DECODE = identity(REVISION, "prefill"), identity(REVISION)
NEXT = make_cluster(engine=65)
NEXT_REVISION = revision_of(NEXT.spec)


def status_of(observed, cluster=CLUSTER):
    return plan_all(cluster, observed, NOW).status


def words_of(status, kind):
    found = condition_of(status, kind)
    return found and (found["status"], found["reason"], found["message"])


def with_decode(state, **fields):
    return running(CLUSTER, workloads=[workload(PREFILL, 1), state], **fields)


def test_what_is_on_its_way_out_has_no_problem():
    """A worker that drains says that it is not ready; one that crashed long ago too."""
    drains = failing_pod(DECODE, 2, words.CRASH_LOOPING)
    status = status_of(with_decode(workload(DECODE, 3, ready=1, pods=(drains,))))
    assert words_of(status, words.DECODE_READY)[1] == words.STARTING


def test_an_unknown_version_of_a_stock_engine_is_reported_while_its_workers_are_ready():
    note = "vLLM 0.99.1 is not known here: use 0.30 to 0.33"
    pods = tuple(pod_state(DECODE, f"decode-{ordinal}") for ordinal in range(2))
    state = workload(DECODE, 2, ready=2, pods=pods)
    devices = {pod.name: WorkerDevice("cpu", "cpu", engine_note=note) for pod in pods}
    records = WorkerRecords({}, devices=devices)

    status = status_of(with_decode(state, worker_records=records))

    assert words_of(status, words.DECODE_READY)[:2] == ("True", words.UNKNOWN_ENGINE_VERSION)
    assert words_of(status, words.PREFILL_READY)[1] == words.AS_DECLARED


def test_the_order_of_pods_does_not_matter():
    pods = tuple(failing_pod(DECODE, ordinal, words.CRASH_LOOPING) for ordinal in (0, 1))
    first = with_decode(workload(DECODE, 2, ready=0, pods=pods))
    second = with_decode(workload(DECODE, 2, ready=0, pods=pods[::-1]))
    assert status_of(first) == status_of(second)


def test_pods_that_are_ready_ending_or_too_many_are_no_problem():
    ill = failing_pod(DECODE, 0, words.CRASH_LOOPING)
    ending = with_decode(
        workload(
            DECODE, 2, ready=1, pods=(replace(ill, terminating=True), replace(ill, ready=True))
        )
    )
    assert words_of(status_of(ending), words.DECODE_READY)[1] == words.STARTING
    surplus = with_decode(workload(DECODE, 2, ready=2, current=3, pods=(ill,)))
    assert words_of(status_of(surplus), words.READY)[0] == "True"


def test_a_fault_of_making_pods_is_over_when_they_are_there():
    fault = (words.QUOTA_EXCEEDED, "quota gpus: used 8, limited 8; raise it or lower replicas")
    healed = status_of(with_decode(workload(DECODE, 2, ready=1, current=2, fault=fault)))
    assert words_of(healed, words.READY)[1] == words.STARTING


def test_a_surplus_pod_of_a_ready_pool_does_not_speak_for_another_pool():
    cluster = make_cluster(decode=[pool(1, "a"), pool(1, "b")])
    revision = revision_of(cluster.spec)
    of_a, of_b = identity(revision, name="a"), identity(revision, name="b")
    ill = (failing_pod(of_a, 1, words.CRASH_LOOPING),)
    states = [
        workload(identity(revision, "prefill"), 1),
        workload(of_a, 1, current=2, pods=ill),
        workload(of_b, 1, ready=0),
    ]
    status = status_of(running(cluster, workloads=states), cluster)
    assert words_of(status, words.DECODE_READY)[1:] == (
        words.STARTING,
        "1 of 2 workers are ready (a 1/1, b 0/1)",
    )


def test_scaling_up_is_scaling_until_it_is_done():
    ready = status_of(running(CLUSTER))
    scalers = [ScalerState("prefill", "cpu", 1, 1), ScalerState("decode", "cpu", 4, 2)]
    asked = running(CLUSTER, status=ready, scalers=scalers)
    first = status_of(asked)
    assert words_of(first, words.READY)[:2] == ("False", words.SCALING)
    grown = replace(
        asked, status=first, workloads=[workload(PREFILL, 1), workload(DECODE, 4, ready=3)]
    )
    second = status_of(grown)
    assert words_of(second, words.READY)[1] == words.SCALING
    assert status_of(replace(grown, status=second)) == second


def old_and_new(new_ready, **fields):
    """The serving revision whole, the next one beside it."""
    of_next = [
        workload(identity(NEXT_REVISION, "prefill"), 1),
        workload(identity(NEXT_REVISION), 2, ready=new_ready, **fields),
    ]
    return running(CLUSTER, workloads=[workload(PREFILL, 1), workload(DECODE, 2), *of_next])


def test_a_surplus_pod_that_ends_is_not_named():
    ending = pod_state(DECODE, 2, ready=False, terminating=True, node="n2")
    surplus = [workload(PREFILL, 1), workload(DECODE, 2, current=3, pods=(ending,))]
    status = status_of(running(CLUSTER, workloads=surplus))
    assert "ending" not in words_of(status, words.DECODE_READY)[2]


def test_messages_are_bounded():
    status = status_of(
        running(CLUSTER, failures=[WriteFailure("Service chat", words.APPLY_FAILED, "x" * 5000)])
    )
    assert len(words_of(status, words.READY)[2]) == MAX_MESSAGE


def test_transition_time_changes_with_the_status_only():
    first = status_of(with_decode(workload(DECODE, 2, ready=0)))
    later = plan_all(
        CLUSTER, with_decode(workload(DECODE, 2, ready=1), status=first, generation=2), LATER
    ).status
    before, after = condition_of(first, words.DECODE_READY), condition_of(later, words.DECODE_READY)
    assert after["message"] != before["message"]
    assert (before["lastTransitionTime"], after["lastTransitionTime"]) == (NOW, NOW)
    assert (before["observedGeneration"], after["observedGeneration"]) == (1, 2)
    assert condition_of(later, words.SERVING)["lastTransitionTime"] == LATER


def test_another_reason_for_the_same_status_is_no_transition():
    first = status_of(with_decode(workload(DECODE, 2, ready=0)))
    ill = workload(DECODE, 2, ready=0, pods=(failing_pod(DECODE, 0, words.CRASH_LOOPING),))
    later = plan_all(CLUSTER, with_decode(ill, status=first), LATER).status
    after = condition_of(later, words.DECODE_READY)
    assert (after["reason"], after["lastTransitionTime"]) == (words.CRASH_LOOPING, NOW)


def test_planning_an_unchanged_cluster_gives_an_equal_status():
    for observed in (running(CLUSTER), with_decode(workload(DECODE, 2, ready=0)), old_and_new(1)):
        first = plan_all(NEXT, observed, NOW)
        again = plan_all(NEXT, replace(observed, status=first.status), LATER)
        assert again.status == first.status
        assert again.events == ()


@pytest.mark.parametrize(
    "status",
    [
        {"conditions": "none", "roles": [{"name": "decode"}], "revision": 3},
        {
            "conditions": [None, {"type": "Ready"}],
            "roles": [{"name": "decode", "pools": [{"name": "cpu", "desired": "2"}]}],
        },
        {"conditions": None, "roles": {"decode": 2}, "servingRevision": ["x"]},
    ],
)
def test_a_spoilt_status_is_written_again(status):
    found = plan_all(CLUSTER, running(CLUSTER, status=status), NOW).status
    assert found == status_of(running(CLUSTER, discovery=ETCD_READY))
