"""The condition tree: what each condition says, and which of them Ready takes its words from."""

from dataclasses import replace

import pytest

from pdcluster_api.plan.observed.problem import Problem
from pdcluster_api.plan.observed.state import DiscoveryState, Observed, ScalerState, WriteFailure
from pdcluster_api.plan.status.fields import MAX_MESSAGE
from pdcluster_api.plan.status.problems import rank
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


def test_all_as_declared():
    status = status_of(running(CLUSTER))
    assert {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]} == {
        words.READY: ("True", words.AS_DECLARED),
        words.SERVING: ("True", words.ANSWERING),
        words.DISCOVERY_READY: ("True", words.ETCD_ANSWERS),
        words.PREFILL_READY: ("True", words.AS_DECLARED),
        words.DECODE_READY: ("True", words.AS_DECLARED),
        words.INGRESS_READY: ("True", words.AS_DECLARED),
        words.KV_TRANSFER_VERIFIED: ("Unknown", words.NOT_VERIFIED),
    }
    assert words_of(status, words.READY)[2] == "prefill 1/1, decode 2/2"


def test_mixed_workers_have_their_own_condition():
    status = status_of(running(make_cluster(mixed=[pool(3)])), make_cluster(mixed=[pool(3)]))
    assert words_of(status, words.MIXED_READY) == (
        "True",
        words.AS_DECLARED,
        "3 of 3 workers are ready",
    )
    assert not condition_of(status, words.DECODE_READY)
    assert (
        words_of(status, words.SERVING)[2]
        == f"requests are answered by 3 ready mixed workers of revision {status['revision']}"
    )


def test_the_first_plan_is_reconciling_and_tells_no_lie():
    status = status_of(Observed(1, {}, DiscoveryState(managed=True, ready=0, desired=1)))
    assert words_of(status, words.READY) == (
        "False",
        words.STARTING,
        "discovery: 0 of 1 etcd members are ready",
    )
    assert words_of(status, words.RECONCILING)[0] == "True"
    assert not condition_of(status, words.STALLED)
    assert words_of(status, words.INGRESS_READY) == (
        "False",
        words.STARTING,
        "the Service is being made",
    )
    assert words_of(status, words.SERVING)[:2] == ("False", words.NOT_ANSWERING)


@pytest.mark.parametrize(
    ("discovery", "status", "reason", "part"),
    [
        (DiscoveryState(managed=True, ready=3, desired=3), "True", words.ETCD_ANSWERS, "3 of 3"),
        (
            DiscoveryState(managed=True, ready=2, desired=3),
            "False",
            words.STARTING,
            "2 of 3 etcd members are ready; it answers all the same",
        ),
        (
            DiscoveryState(managed=True, ready=1, desired=3, error="no quorum"),
            "False",
            words.STARTING,
            "1 of 3 etcd members are ready; no quorum",
        ),
        (
            DiscoveryState(managed=True, ready=1, desired=1, error="timeout"),
            "False",
            words.ETCD_UNREACHABLE,
            "timeout; workers that know each other go on",
        ),
        (
            DiscoveryState(managed=True, ready=1, desired=1, is_full=True, in_memory=True),
            "False",
            words.ETCD_FULL,
            "no room (alarm NOSPACE), so no worker can register and none can be drained; workers "
            "that know each other go on; delete its pod",
        ),
        (
            DiscoveryState(managed=True, ready=3, desired=3, is_full=True),
            "False",
            words.ETCD_FULL,
            "`kubectl exec POD -c etcd -- etcdctl alarm disarm`",
        ),
        (
            DiscoveryState(managed=False, is_full=True),
            "False",
            words.ETCD_FULL,
            "`etcdctl compact`",
        ),
        (
            DiscoveryState(managed=False, error="etcd a:2379 is gone", is_full=True),
            "False",
            words.ETCD_UNREACHABLE,
            "etcd a:2379 is gone",
        ),
        (DiscoveryState(managed=False), "True", words.ETCD_ANSWERS, "etcd answers"),
        (
            DiscoveryState(managed=False, error="etcd a:2379 refuses"),
            "False",
            words.ETCD_UNREACHABLE,
            "etcd a:2379 refuses",
        ),
    ],
)
def test_discovery(discovery, status, reason, part):
    found = status_of(running(CLUSTER, discovery=discovery))
    assert words_of(found, words.DISCOVERY_READY)[:2] == (status, reason)
    assert part in words_of(found, words.DISCOVERY_READY)[2]
    assert words_of(found, words.READY)[0] == status
    assert words_of(found, words.SERVING)[0] == "True"


@pytest.mark.parametrize(("ready", "answers"), [(0, False), (2, True)])
def test_a_member_of_our_etcd_that_cannot_start_is_reported(ready, answers):
    problem = Problem(words.IMAGE_NOT_PULLED, "pod chat-etcd-0: image 'etcd' cannot be pulled")
    status = status_of(
        running(
            CLUSTER, discovery=DiscoveryState(managed=True, ready=ready, desired=3, problem=problem)
        )
    )
    _, reason, message = words_of(status, words.READY)
    assert reason == words.IMAGE_NOT_PULLED
    assert problem[1] in message
    assert ("answers all the same" in message) == answers
    assert words_of(status, words.STALLED)[1] == words.IMAGE_NOT_PULLED


def test_losing_every_prefill_worker_is_not_an_outage():
    status = status_of(
        running(CLUSTER, workloads=[workload(PREFILL, 1, ready=0), workload(DECODE, 2)])
    )
    assert words_of(status, words.READY)[:2] == ("False", words.STARTING)
    assert words_of(status, words.SERVING)[:2] == ("True", words.ANSWERING)
    assert (
        "no prefill worker is ready, so they prefill themselves"
        in words_of(status, words.SERVING)[2]
    )


def test_losing_every_decode_worker_is_one():
    status = status_of(with_decode(workload(DECODE, 2, ready=0)))
    assert words_of(status, words.SERVING)[:2] == ("False", words.NOT_ANSWERING)
    assert words_of(status, words.INGRESS_READY)[:2] == ("False", words.NOT_ANSWERING)
    assert words_of(status, words.READY) == (
        "False",
        words.STARTING,
        "decode: 0 of 2 workers are ready",
    )


def test_a_lost_service_is_not_ready_and_not_serving():
    status = status_of(running(CLUSTER, service_revision=None))
    assert words_of(status, words.READY) == (
        "False",
        words.STARTING,
        "ingress: the Service is being made",
    )
    assert words_of(status, words.SERVING)[0] == "False"


def test_keys_that_no_client_can_have_are_the_ingresss_fault():
    status = status_of(
        replace(
            running(CLUSTER),
            key_fault=Problem(words.CONFIGURATION_REFUSED, "Secret keys does not exist"),
        )
    )
    assert words_of(status, words.INGRESS_READY) == (
        "False",
        words.CONFIGURATION_REFUSED,
        "Secret keys does not exist",
    )
    assert words_of(status, words.READY) == (
        "False",
        words.CONFIGURATION_REFUSED,
        "ingress: Secret keys does not exist",
    )
    assert words_of(status, words.STALLED)[0] == "True"


def test_with_keys_that_no_client_can_have_no_request_is_answered():
    missing = (words.CONFIGURATION_REFUSED, "Secret keys does not exist")
    status = status_of(running(CLUSTER, key_fault=missing))
    assert words_of(status, words.SERVING) == ("False", *missing)
    # An older revision goes on with the keys that it asks for.
    assert (
        words_of(status_of(running(CLUSTER, key_fault=missing), NEXT), words.SERVING)[0] == "True"
    )


def test_a_secret_of_keys_that_cannot_be_read_is_a_missing_right_and_may_hold_some():
    status = status_of(
        running(CLUSTER, key_fault=Problem(words.FORBIDDEN, "Secret keys cannot be read"))
    )
    assert words_of(status, words.INGRESS_READY) == (
        "False",
        words.FORBIDDEN,
        "Secret keys cannot be read",
    )
    assert words_of(status, words.READY)[:2] == ("False", words.FORBIDDEN)
    assert words_of(status, words.SERVING)[0] == "True"


def test_ready_takes_the_worst_pods_words_and_says_how_many_share_its_reason():
    pods = (
        failing_pod(DECODE, 0, words.UNSCHEDULABLE, "no node"),
        failing_pod(DECODE, 2, words.IMAGE_NOT_PULLED, "not found"),
        failing_pod(DECODE, 1, words.IMAGE_NOT_PULLED, "denied"),
    )
    three = make_cluster(decode=(pool(3),))
    observed = running(
        three, workloads=[workload(PREFILL, 1), workload(DECODE, 3, ready=0, pods=pods)]
    )
    status = plan_all(three, observed, NOW).status
    expected = f"2 of 3 workers: pod {DECODE.name}-1: denied"
    assert words_of(status, words.DECODE_READY) == ("False", words.IMAGE_NOT_PULLED, expected)
    assert words_of(status, words.READY) == ("False", words.IMAGE_NOT_PULLED, f"decode: {expected}")
    assert words_of(status, words.STALLED) == (
        "True",
        words.IMAGE_NOT_PULLED,
        f"decode: {expected}",
    )
    assert not condition_of(status, words.RECONCILING)


def test_engines_that_do_not_serve_yet_are_named():
    pods = tuple(
        pod_state(DECODE, ordinal, ready=False, loading=f"pod {ordinal}: its engine runs")
        for ordinal in (3, 1, 0)
    )
    status = status_of(with_decode(workload(DECODE, 2, ready=0, pods=pods)))

    said = "0 of 2 workers are ready; pod 0: its engine runs (and 1 more)"
    assert words_of(status, words.DECODE_READY) == ("False", words.STARTING, said)
    assert words_of(status, words.READY)[1:] == (words.STARTING, f"decode: {said}")


def test_what_is_on_its_way_out_has_no_problem():
    """A worker that drains says that it is not ready; one that crashed long ago too."""
    drains = failing_pod(DECODE, 2, words.CRASH_LOOPING)
    status = status_of(with_decode(workload(DECODE, 3, ready=1, pods=(drains,))))
    assert words_of(status, words.DECODE_READY)[1] == words.STARTING


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


def test_pods_that_cannot_be_made():
    fault = (words.QUOTA_EXCEEDED, "quota gpus: used 8, limited 8; raise it or lower replicas")
    status = status_of(with_decode(workload(DECODE, 2, ready=0, current=0, fault=fault)))
    assert words_of(status, words.READY) == (
        "False",
        words.QUOTA_EXCEEDED,
        f"decode: 2 of 2 workers: pool cpu: {fault[1]}",
    )
    assert words_of(status, words.STALLED)[0] == "True"
    healed = status_of(with_decode(workload(DECODE, 2, ready=1, current=2, fault=fault)))
    assert words_of(healed, words.READY)[1] == words.STARTING


@pytest.mark.parametrize("reason", [words.UNSCHEDULABLE, words.DOWNLOADING_MODEL])
def test_what_may_pass_by_waiting_is_reconciling(reason):
    status = status_of(
        with_decode(workload(DECODE, 2, ready=1, pods=(failing_pod(DECODE, 1, reason),)))
    )
    assert words_of(status, words.RECONCILING)[1] == reason
    assert not condition_of(status, words.STALLED)


def test_several_pools_are_counted_apart_and_a_surplus_hides_no_lack():
    cluster = make_cluster(decode=[pool(2, "a"), pool(2, "b")])
    revision = revision_of(cluster.spec)
    states = [
        workload(identity(revision, "prefill"), 1),
        workload(identity(revision, name="a"), 2, ready=3),
        workload(identity(revision, name="b"), 2, ready=1),
    ]
    status = status_of(running(cluster, workloads=states), cluster)
    assert words_of(status, words.DECODE_READY)[2] == "3 of 4 workers are ready (a 2/2, b 1/2)"
    assert words_of(status, words.READY)[0] == "False"


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


def test_a_clamped_scale_is_reported_and_is_no_fault():
    cluster = make_cluster(decode=[pool(2, maxReplicas=2)])
    observed = running(
        cluster, scalers=[ScalerState("prefill", "cpu", 1, 1), ScalerState("decode", "cpu", 7, 2)]
    )
    status = status_of(observed, cluster)
    assert words_of(status, words.DECODE_READY) == (
        "True",
        words.AS_DECLARED,
        "2 of 2 workers are ready; pool cpu: 7 workers are asked for, maxReplicas is 2",
    )


def test_scaling_up_is_scaling_until_it_is_done():
    ready = status_of(running(CLUSTER))
    scalers = [ScalerState("prefill", "cpu", 1, 1), ScalerState("decode", "cpu", 4, 2)]
    asked = running(CLUSTER, status=ready, scalers=scalers)
    first = status_of(asked)
    assert words_of(first, words.READY) == (
        "False",
        words.SCALING,
        "decode: 2 of 4 workers are ready",
    )
    grown = replace(
        asked, status=first, workloads=[workload(PREFILL, 1), workload(DECODE, 4, ready=3)]
    )
    second = status_of(grown)
    assert words_of(second, words.READY)[1] == words.SCALING
    assert status_of(replace(grown, status=second)) == second


def test_scaling_down_leaves_the_cluster_ready():
    scalers = [ScalerState("prefill", "cpu", 1, 1), ScalerState("decode", "cpu", 1, 2)]
    status = status_of(running(CLUSTER, status=status_of(running(CLUSTER)), scalers=scalers))
    assert words_of(status, words.READY)[:2] == ("True", words.AS_DECLARED)
    assert status["decode"] == "2/1"


def test_nothing_declared_is_ready_and_answers_nothing():
    cluster = make_cluster(prefill=[pool(0)], decode=[pool(0)])
    status = status_of(running(cluster), cluster)
    assert words_of(status, words.READY)[0] == "True"
    assert words_of(status, words.INGRESS_READY) == (
        "True",
        words.AS_DECLARED,
        "the Service is there; no decode worker is declared",
    )
    assert words_of(status, words.SERVING)[:2] == ("False", words.NOT_ANSWERING)


def old_and_new(new_ready, **fields):
    """The serving revision whole, the next one beside it."""
    of_next = [
        workload(identity(NEXT_REVISION, "prefill"), 1),
        workload(identity(NEXT_REVISION), 2, ready=new_ready, **fields),
    ]
    return running(CLUSTER, workloads=[workload(PREFILL, 1), workload(DECODE, 2), *of_next])


def test_a_roll_out_under_way():
    status = status_of(old_and_new(1), NEXT)
    assert words_of(status, words.READY) == (
        "False",
        words.ROLLING_OUT,
        f"roll out to revision {NEXT_REVISION}: decode: 1 of 2 workers are ready; revision "
        f"{REVISION} goes on serving",
    )
    assert words_of(status, words.SERVING)[0] == words_of(status, words.INGRESS_READY)[0] == "True"
    assert (status["prefill"], status["decode"]) == ("1/1", "2/2")
    assert (status["revision"], status["servingRevision"]) == (NEXT_REVISION, REVISION)


def test_a_roll_out_that_fails_says_why_and_what_serves():
    pods = (
        failing_pod(
            identity(NEXT_REVISION), 0, words.CONFIGURATION_REFUSED, "num_blocks: too many"
        ),
    )
    status = status_of(old_and_new(1, pods=pods), NEXT)
    _, reason, message = words_of(status, words.READY)
    assert reason == words.CONFIGURATION_REFUSED
    assert "num_blocks: too many" in message
    assert message.endswith(f"revision {REVISION} goes on serving")
    assert words_of(status, words.STALLED)[0] == "True"
    assert words_of(status, words.SERVING)[0] == "True"


def test_a_roll_out_that_waits_for_etcd_says_so():
    status = status_of(
        replace(old_and_new(2), discovery=DiscoveryState(managed=False, error="etcd is gone")), NEXT
    )
    assert words_of(status, words.READY)[1] == words.ETCD_UNREACHABLE
    assert status["servingRevision"] == REVISION


def test_a_roll_out_that_switches_is_not_over():
    status = status_of(old_and_new(2), NEXT)
    assert words_of(status, words.READY) == (
        "False",
        words.ROLLING_OUT,
        f"roll out to revision {NEXT_REVISION}: its workers take over",
    )
    assert status["servingRevision"] == NEXT_REVISION


def test_recreate_says_what_it_waits_for():
    next_cluster = make_cluster(engine=65, strategy="Recreate")
    leaving = [
        workload(PREFILL, 0, current=1, gone=True),
        workload(DECODE, 0, current=2, gone=True),
    ]
    status = status_of(running(CLUSTER, workloads=leaving), next_cluster)
    assert words_of(status, words.READY)[1] == words.ROLLING_OUT
    assert (
        "the old revision has to end first; 3 of its pods are left"
        in words_of(status, words.READY)[2]
    )
    assert words_of(status, words.SERVING)[0] == "False"


def ending(of, ordinal):
    return pod_state(of, ordinal, ready=False, terminating=True, node=f"n{ordinal}")


def test_recreate_names_a_pod_that_it_waits_for_and_its_node():
    stuck = workload(DECODE, 0, current=2, gone=True, pods=(ending(DECODE, 4), ending(DECODE, 1)))
    status = status_of(
        running(CLUSTER, workloads=[stuck]), make_cluster(engine=65, strategy="Recreate")
    )
    assert words_of(status, words.READY)[2].endswith(
        f"2 of its pods are left, first pod {DECODE.name}-1 on node n1"
    )


def test_a_pod_that_keeps_the_place_of_another_is_named_with_its_node():
    rest = [
        workload(PREFILL, 1),
        workload(DECODE, 0, current=2, gone=True, pods=(ending(DECODE, 4), ending(DECODE, 1))),
    ]
    status = status_of(running(CLUSTER, workloads=rest), CLUSTER)
    expected = (
        f"0 of 2 workers are ready; pod {DECODE.name}-1 on node n1 is still ending (and 1 more)"
    )
    assert words_of(status, words.DECODE_READY)[2] == expected
    surplus = [workload(PREFILL, 1), workload(DECODE, 2, current=3, pods=(ending(DECODE, 2),))]
    assert (
        "ending"
        not in words_of(
            status_of(running(CLUSTER, workloads=surplus), CLUSTER), words.DECODE_READY
        )[2]
    )


def test_recreate_waits_for_an_unfinished_target_too():
    third = make_cluster(engine=66, strategy="Recreate")
    status = status_of(
        running(CLUSTER, workloads=[workload(identity(NEXT_REVISION), 0, current=1, gone=True)]),
        third,
    )
    assert words_of(status, words.READY)[1] == words.ROLLING_OUT
    assert words_of(status, words.READY)[2].startswith("roll out to revision ")
    assert "1 of its pods are left" in words_of(status, words.DECODE_READY)[2]


def test_recreate_to_nothing_waits_all_the_same():
    empty = make_cluster(prefill=[pool(0)], decode=[pool(0)], engine=65, strategy="Recreate")
    status = status_of(
        running(CLUSTER, workloads=[workload(DECODE, 0, current=2, gone=True)]), empty
    )
    assert words_of(status, words.READY)[2].endswith(
        "the old revision has to end first; 2 of its pods are left"
    )


def test_failures_of_the_last_pass_come_first_with_the_objects_name():
    failures = [
        WriteFailure(
            "Service chat", words.NAME_TAKEN, "it belongs to another owner; rename one of the two"
        ),
        WriteFailure(
            "PodMonitor chat",
            words.FORBIDDEN,
            "the operator may not create podmonitors; extend its role",
        ),
    ]
    status = status_of(running(CLUSTER, failures=failures))
    expected = (
        "PodMonitor chat: the operator may not create podmonitors; extend its role (and 1 more)"
    )
    assert words_of(status, words.READY) == ("False", words.FORBIDDEN, expected)
    assert words_of(status, words.STALLED) == ("True", words.FORBIDDEN, expected)
    assert words_of(status, words.SERVING)[0] == "True"
    assert status_of(running(CLUSTER, failures=failures[::-1])) == status


def test_messages_are_bounded():
    status = status_of(
        running(CLUSTER, failures=[WriteFailure("Service chat", words.APPLY_FAILED, "x" * 5000)])
    )
    assert len(words_of(status, words.READY)[2]) == MAX_MESSAGE


def test_an_unknown_reason_is_one_that_a_user_looks_at():
    assert rank("SomethingNew") == rank(words.APPLY_FAILED)
    assert rank(words.FORBIDDEN) < rank(words.UNSCHEDULABLE) < rank(words.STARTING)


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


def test_a_failure_comes_before_what_only_waits_for_it():
    failures = [
        WriteFailure("Deployment chat-etcd", words.NAME_TAKEN, "waits for x", waits=True),
        WriteFailure("ServiceAccount chat-pdc", words.NAME_TAKEN, "it belongs to another owner"),
    ]
    message = words_of(status_of(running(CLUSTER, failures=failures)), words.READY)[2]
    assert message == "ServiceAccount chat-pdc: it belongs to another owner (and 1 more)"
