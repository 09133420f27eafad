"""An object that is refused: its status names every fault, and reports what runs as it is."""

from dataclasses import replace

import pytest

from pdcluster_api.plan.cluster_status import NOTHING_IS_REVERTED, plan_invalid
from pdcluster_api.plan.observed.state import DiscoveryState, Observed, Problem
from pdcluster_schema import conditions as words
from pdcluster_schema.faults import Fault
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.plan.clusters import (
    ETCD_READY,
    LATER,
    NOW,
    condition_of,
    identity,
    make_cluster,
    plan_all,
    running,
    workload,
)

FAULTS = [
    Fault(
        "spec.roles.decode.pools[0].gpu",
        "'B900' is not a known accelerator",
        "use one of B200, cpu",
    ),
    Fault("spec.x", "bad", "drop it"),
]
CLUSTER = make_cluster()
A = revision_of(CLUSTER.spec)
READY = plan_all(CLUSTER, running(CLUSTER), NOW).status
UNKNOWN = DiscoveryState(managed=True)  # the etcd of a spec that cannot be read is unknown


def refused(**fields):
    return replace(running(CLUSTER, status=READY), generation=2, discovery=UNKNOWN, **fields)


def test_every_fault_is_reported_and_the_cluster_is_stalled():
    status = plan_invalid(FAULTS, refused(), LATER).status
    ready = condition_of(status, words.READY)
    assert (ready["status"], ready["reason"], ready["lastTransitionTime"]) == (
        "False",
        words.INVALID_SPEC,
        LATER,
    )
    assert ready["message"] == f"{FAULTS[0]}; {FAULTS[1]}; {NOTHING_IS_REVERTED}"
    assert condition_of(status, words.STALLED)["message"] == ready["message"]
    assert not condition_of(status, words.RECONCILING)
    assert status["observedGeneration"] == 2


def test_what_runs_goes_on_and_is_reported_as_it_is():
    live = [workload(identity(A, "prefill"), 1), workload(identity(A), 2, ready=1)]
    status = plan_invalid(FAULTS, refused(workloads=live), LATER).status
    assert status["decode"] == "1/2"
    assert condition_of(status, words.DECODE_READY)["status"] == "False"
    assert (
        condition_of(status, words.PREFILL_READY)["status"]
        == condition_of(status, words.SERVING)["status"]
        == "True"
    )
    assert {key: status[key] for key in ("endpoint", "model", "revision", "servingRevision")} == {
        key: READY[key] for key in ("endpoint", "model", "revision", "servingRevision")
    }


def test_the_size_that_runs_counts_as_desired():
    live = [workload(identity(A, "prefill"), 1), workload(identity(A), 3)]
    status = plan_invalid(FAULTS, refused(workloads=live), LATER).status
    assert status["decode"] == "3/3"


def test_an_etcd_that_was_not_read_is_reported_as_before():
    status = plan_invalid(FAULTS, refused(), LATER).status
    assert condition_of(status, words.DISCOVERY_READY) == {
        **condition_of(READY, words.DISCOVERY_READY),
        "observedGeneration": 2,
    }


@pytest.mark.parametrize(
    ("reason", "serves"), [(words.CONFIGURATION_REFUSED, "False"), (words.FORBIDDEN, "True")]
)
def test_what_was_wrong_with_the_api_keys_still_is(reason: str, serves: str):
    before = plan_all(
        CLUSTER, running(CLUSTER, key_fault=Problem(reason, "Secret keys: no key")), NOW
    ).status
    status = plan_invalid(FAULTS, replace(refused(), status=before), LATER).status
    for kind in (words.INGRESS_READY, words.SERVING):
        assert condition_of(status, kind) == {**condition_of(before, kind), "observedGeneration": 2}
    assert (
        condition_of(status, words.INGRESS_READY)["status"],
        condition_of(status, words.SERVING)["status"],
    ) == ("False", serves)


def test_an_ingress_that_does_not_answer_is_reported_as_it_is():
    before = plan_all(CLUSTER, running(CLUSTER, service_revision=None), NOW).status
    status = plan_invalid(FAULTS, replace(refused(), status=before), LATER).status
    assert condition_of(status, words.INGRESS_READY)["status"] == "True"


def test_its_event_comes_once():
    first = plan_invalid(FAULTS, refused(), NOW)
    assert [(each.reason, each.warning) for each in first.events] == [(words.INVALID_SPEC, True)]
    again = plan_invalid(FAULTS, replace(refused(), status=first.status), LATER)
    assert (again.status, again.events) == (first.status, ())


def test_an_object_that_never_was_valid():
    status = plan_invalid(FAULTS, Observed(1, {}, UNKNOWN), NOW).status
    assert [each["type"] for each in status["conditions"]] == [
        words.READY,
        words.SERVING,
        words.STALLED,
    ]
    assert "roles" not in status


def test_a_mended_object_is_ready_again():
    status = plan_invalid(FAULTS, refused(), NOW).status
    plan = plan_all(
        CLUSTER, running(CLUSTER, status=status, generation=3, discovery=ETCD_READY), LATER
    )
    assert condition_of(plan.status, words.READY)["status"] == "True"
    assert [each.reason for each in plan.events] == [words.READY]


def test_in_a_roll_out_the_numbers_stay_those_of_what_serves():
    rolling = plan_all(make_cluster(engine=65), running(CLUSTER, status=READY), NOW).status
    status = plan_invalid(FAULTS, replace(refused(), status=rolling), LATER).status
    assert status["decode"] == "2/2"
    assert condition_of(status, words.SERVING)["status"] == "True"


def test_an_unknown_role_in_a_spoilt_status_is_left_out():
    spoilt = {**READY, "roles": [{"name": "router", "pools": [{"name": "cpu", "desired": 1}]}]}
    assert "router" not in str(
        plan_invalid(FAULTS, replace(refused(), status=spoilt), NOW).status["conditions"]
    )
