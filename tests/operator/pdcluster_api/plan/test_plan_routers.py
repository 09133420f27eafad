"""Routers before the other roles: where the Service leads, what counts as answering, and what the
autoscaler leaves alone.
"""

from dataclasses import replace
from typing import Any

import pytest

from pdcluster_api.manifests.worker_config import requires_keys
from pdcluster_api.plan.observed.state import ScalerState
from pdcluster_schema import conditions as words
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdctl.local.plan import plan_local
from tests.operator.pdcluster_api.plan.clusters import (
    NOW,
    condition_of,
    identity,
    plan_all,
    running,
    workload,
)
from tests.schema.object_cases import CPU, at, minimal

ROUTERS = {"pools": [{"name": "cpu", "replicas": 2}]}


def routed(**changes: Any) -> PDCluster:
    document = minimal()
    at("spec.roles.router", ROUTERS)(document)
    at("spec.engine", {"blockSize": 32, "threads": 3})(document)
    for path, value in changes.items():
        at(path.replace("__", "."), value)(document)
    return parse(document)


CLUSTER = routed()
REVISION = revision_of(CLUSTER.spec)


def states(routers: int, decodes: int) -> list[Any]:
    sizes = {"prefill": (1, 1), "decode": (1, decodes), "router": (2, routers)}
    return [
        workload(identity(REVISION, role), wanted, ready) for role, (wanted, ready) in sizes.items()
    ]


def test_routers_answer_once_all_is_ready() -> None:
    plan = plan_all(CLUSTER, running(CLUSTER), NOW)

    assert plan.serving_role == "router"
    assert (plan.status["router"], plan.status["decode"], plan.status["prefill"]) == (
        "2/2",
        "1/1",
        "1/1",
    )
    assert {
        kind: condition_of(plan.status, kind)["status"]
        for kind in (words.READY, words.ROUTER_READY, words.SERVING)
    } == {
        words.READY: "True",
        words.ROUTER_READY: "True",
        words.SERVING: "True",
    }
    assert {(scaler.role, scaler.pool) for scaler in plan.scalers} == {
        (role, "cpu") for role in ("prefill", "decode", "router")
    }
    assert {each.role for each in plan.budgets} >= {"router"}


@pytest.mark.parametrize(("routers", "decodes"), [(2, 0), (0, 1)])
def test_routers_without_decode_workers_answer_nothing_and_nothing_answers_without_routers(
    routers: int, decodes: int
) -> None:
    plan = plan_all(CLUSTER, running(CLUSTER, workloads=states(routers, decodes)), NOW)

    assert condition_of(plan.status, words.SERVING)["status"] == "False"
    assert condition_of(plan.status, words.READY)["status"] == "False"


ZERO = {"pools": [{**CPU, "replicas": 0, "minReplicas": 0, "maxReplicas": 2}]}
HOLD = {"admission": {"workerWaitSeconds": 60}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "no worker is asked for: routers refuse requests until a pool is scaled up, or hold"),
        (
            {"spec__qos": HOLD},
            "no worker is asked for: routers hold requests for 60 s at most, until a pool is",
        ),
        (
            {"spec__qos": HOLD, "spec__autoscale": {"mode": "On"}},
            "all workers sleep: routers hold requests for 60 s at most, and one that they hold",
        ),
    ],
    ids=["refuses", "holds", "sleeps"],
)
def test_a_cluster_at_zero_is_ready_and_says_what_routers_do_meanwhile(
    changes: dict[str, Any], said: str
) -> None:
    cluster = routed(spec__roles__decode=ZERO, spec__roles__prefill=ZERO, **changes)
    plan = plan_all(cluster, running(cluster), NOW)
    ready, serving = (condition_of(plan.status, kind) for kind in (words.READY, words.SERVING))

    assert (ready["status"], ready["reason"]) == ("True", words.SCALED_TO_ZERO)
    assert ready["message"].startswith(f"prefill 0/0, decode 0/0, router 2/2; {said}")
    assert (serving["status"], serving["reason"]) == ("False", words.SCALED_TO_ZERO)
    assert serving["message"].startswith(said)
    assert words.severity_of(words.SERVING, "False", words.SCALED_TO_ZERO) == "fine"
    assert not any(event.warning for event in plan.events)


def test_a_cluster_at_zero_without_routers_answers_nothing() -> None:
    cluster = routed(
        spec__roles__decode=ZERO,
        spec__roles__prefill=ZERO,
        spec__roles__router={"pools": [{"name": "cpu", "replicas": 0}]},
    )
    status = plan_all(cluster, running(cluster), NOW).status

    assert condition_of(status, words.READY)["reason"] == words.SCALED_TO_ZERO
    assert condition_of(status, words.SERVING)["reason"] == words.NOT_ANSWERING


def sized(routers: int, ready: int, decodes: int = 1) -> list[Any]:
    """Workloads of the cluster, so many routers of which are asked for."""
    sizes = {"prefill": (1, 1), "decode": (1, decodes), "router": (routers, ready)}
    return [
        workload(identity(REVISION, role), wanted, num_ready)
        for role, (wanted, num_ready) in sizes.items()
    ]


def scalers(routers: int, declared: int) -> list[ScalerState]:
    computing = [ScalerState(role, "cpu", 1, 1) for role in ("prefill", "decode")]
    return [*computing, ScalerState("router", "cpu", routers, seen=declared)]


@pytest.mark.parametrize("declared", [0, 2], ids=["replicas", "scaled"])
def test_service_of_no_routers_leads_to_decode_workers(declared: int) -> None:
    cluster = routed(spec__roles__router={"pools": [{"name": "cpu", "replicas": declared}]})
    observed = running(
        cluster, workloads=sized(0, 0), scalers=scalers(0, declared), service_role="router"
    )
    plan = plan_all(cluster, observed, NOW)
    settled = plan_all(cluster, replace(observed, service_role="decode"), NOW).status

    assert revision_of(cluster.spec) == REVISION
    assert (plan.serving_role, plan.status["router"]) == ("decode", "0/0")
    assert {condition_of(settled, kind)["status"] for kind in (words.READY, words.SERVING)} == {
        "True"
    }


@pytest.mark.parametrize(("ready", "role"), [(0, "decode"), (1, "router")])
def test_service_leads_to_routers_again_when_one_is_ready(ready: int, role: str) -> None:
    plan = plan_all(
        CLUSTER, running(CLUSTER, workloads=sized(2, ready), service_role="decode"), NOW
    )

    assert plan.serving_role == role
    assert condition_of(plan.status, words.SERVING)["status"] == "True"


def test_service_of_a_roll_out_that_ends_leads_to_decode_workers_until_a_router_is_ready() -> None:
    observed = running(CLUSTER, workloads=sized(2, 0), service_role="decode")
    wide = replace(observed, service_revision="old", service_is_wide=True)
    plan = plan_all(CLUSTER, wide, NOW)

    assert (plan.serving, plan.serving_role, plan.is_wide) == (REVISION, "decode", False)


def test_older_revision_without_a_router_is_answered_by_its_decode_workers() -> None:
    cluster = routed(spec__engine={"blockSize": 64})
    old = [replace(state, id=replace(state.id, revision="old")) for state in sized(0, 0)]
    status = {"servingRevision": "old"}
    plan = plan_all(
        cluster,
        running(
            cluster, workloads=old, scalers=scalers(0, 2), service_revision="old", status=status
        ),
        NOW,
    )

    assert (plan.serving, plan.serving_role) == ("old", "decode")


def test_routers_scaled_to_none_still_get_api_keys() -> None:
    cluster = routed(
        spec__roles__router={"pools": [{"name": "cpu", "replicas": 0}]},
        spec__service={"apiKeySecret": "keys"},
    )

    assert {role: requires_keys(cluster, role) for role in cluster.spec.roles.present()} == {
        "prefill": False,
        "decode": True,
        "router": True,
    }


def test_one_machine_without_a_router_serves_from_its_decode_worker() -> None:
    document = minimal()
    at("spec.roles.router", {"pools": [{"name": "cpu", "replicas": 0}]})(document)

    assert plan_local(parse(document), cores=4, port=8000).ingress.name == "chat-decode-cpu-0"


def test_router_serves_at_the_port_of_one_machine_and_takes_no_cores() -> None:
    document = minimal()
    at("spec.roles.router", ROUTERS)(document)
    plan = plan_local(parse(document), cores=4, port=8000)

    assert (plan.ingress.name, plan.ingress.http_port) == ("chat-router-cpu-0", 8000)
    assert {process.name: process.engine.threads for process in plan.processes} == {
        "chat-prefill-cpu-0": 2,
        "chat-decode-cpu-0": 2,
        "chat-router-cpu-0": 0,
        "chat-router-cpu-1": 0,
    }
