"""AcceleratorsInUse over time and beside other conditions; its messages are in tests/golden."""

from typing import Any

import pytest

from pdcluster_api.plan.observed.state import (
    Observed,
    Problem,
    ScalerState,
    WorkerDevice,
    WorkerRecords,
)
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.plan.clusters import (
    ETCD_READY,
    LATER,
    NOW,
    Planned,
    condition_of,
    identity,
    plan_all,
    workload,
)
from tests.operator.pods import pod_state

ON_CPU, ON_GPU = WorkerDevice("cpu", "Xeon"), WorkerDevice("cuda", "NVIDIA B200")
REFUSED = Problem(
    "AcceleratorUnusable",
    "pod p: the worker has not the device that it should compute on: pool big asks for cuda",
)
B200 = {"name": "big", "gpu": "B200", "replicas": 1}
# a type of its own, which asks for no resource
HERE = {"name": "own", "gpu": "epyc", "replicas": 1}


def cluster_of(
    decode: dict[str, Any], device: str = "auto", prefill: dict[str, Any] | None = None
) -> PDCluster:
    """1P1D.  device: of the decode role."""
    roles = {
        "prefill": {"pools": [prefill or {"name": "cpu", "replicas": 1}]},
        "decode": {"pools": [decode], "engine": {"device": device}},
    }
    spec = {
        "model": {"name": "tiny", "path": "/models/tiny"},
        "roles": roles,
        "accelerators": {"epyc": {}},
    }
    return parse(
        {
            "apiVersion": "pdcluster.io/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "chat"},
            "spec": spec,
        }
    )


def seen(
    cluster: PDCluster,
    worker_records: WorkerRecords | None,
    problem: Problem | None = None,
    **fields: Any,
) -> Observed:
    """All pods are there and ready, but that of decode where it has a problem; a pod is called
    after its role.
    """
    revision = revision_of(cluster.spec)
    pools = [
        (role, pool) for role, spec in cluster.spec.roles.present().items() for pool in spec.pools
    ]
    states = []
    for role, pool in pools:
        of, wrong = identity(revision, role, pool.name), problem if role == "decode" else None
        pods = (pod_state(of, f"{role}-0", ready=wrong is None, problem=wrong),)[: pool.replicas]
        states.append(workload(of, pool.replicas, ready=sum(pod.ready for pod in pods), pods=pods))
    return Observed(
        **{
            "generation": 1,
            "status": {},
            "discovery": ETCD_READY,
            "workloads": states,
            "scalers": [
                ScalerState(role, pool.name, pool.replicas, pool.replicas) for role, pool in pools
            ],
            "service_revision": revision,
            "worker_records": worker_records,
            **fields,
        }
    )


def say(**devices: WorkerDevice) -> WorkerRecords:
    """Records of prefill-0 and decode-0 with these devices."""
    return WorkerRecords(
        {"prefill-0": "ready", "decode-0": "ready"},
        devices={f"{role}-0": device for role, device in devices.items()},
    )


def found(plan: Planned) -> tuple[str, str, str]:
    condition = condition_of(plan.status, "AcceleratorsInUse")
    return condition["status"], condition["reason"], condition["message"]


@pytest.mark.parametrize("pool", [B200, HERE], ids=["B200", "own-type"])
@pytest.mark.parametrize(
    "worker_records",
    [None, WorkerRecords(error="etcd does not answer"), WorkerRecords()],
    ids=["unasked", "away", "empty"],
)
def test_a_worker_without_its_device_makes_it_false_and_the_cluster_stalled(
    pool: dict[str, Any], worker_records: WorkerRecords | None
):
    cluster = cluster_of(pool)
    plan = plan_all(cluster, seen(cluster, worker_records, REFUSED), NOW)
    assert found(plan)[:2] == ("False", "AcceleratorUnusable")
    assert (
        condition_of(plan.status, "DecodeReady")["reason"]
        == condition_of(plan.status, "Stalled")["reason"]
        == "AcceleratorUnusable"
    )
    # reported with Ready, and not twice
    assert [each.reason for each in plan.events].count("AcceleratorUnusable") == 1


def test_a_pool_of_no_workers_says_nothing_for_another():
    cluster = cluster_of(B200, prefill={"name": "small", "gpu": "H200", "replicas": 0})
    assert found(plan_all(cluster, seen(cluster, say(decode=ON_GPU)), NOW))[0] == "True"
    nothing = cluster_of({**B200, "replicas": 0})
    assert found(plan_all(nothing, seen(nothing, WorkerRecords()), NOW))[0] == "Unknown"


def test_while_etcd_does_not_answer_it_stays_as_it_was_and_its_event_comes_once():
    cluster = cluster_of(B200, "cpu")
    first = plan_all(cluster, seen(cluster, say(decode=ON_CPU)), NOW)
    again = plan_all(
        cluster, seen(cluster, WorkerRecords(error="away"), status=first.status), LATER
    )

    assert again.status["conditions"] == first.status["conditions"]
    assert [each for each in again.events if each.reason == "AcceleratorsIdle"] == []


def test_a_refusal_that_is_over_is_not_kept_while_etcd_is_away():
    cluster = cluster_of(B200)
    first = plan_all(cluster, seen(cluster, None, REFUSED), NOW)
    assert (
        found(
            plan_all(
                cluster, seen(cluster, WorkerRecords(error="away"), status=first.status), LATER
            )
        )[0]
        == "Unknown"
    )
