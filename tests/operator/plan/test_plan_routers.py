"""Routers before the other roles: where the Service leads, what counts as answering, and what the autoscaler leaves alone."""

from typing import Any

import pytest

from pdcluster_operator.api import conditions as words
from pdcluster_operator.api.load import parse
from pdcluster_operator.api.pdcluster import PDCluster
from pdcluster_operator.api.revision import revision_of
from pdcluster_operator.manifests.render import render_shared
from pdcluster_operator.manifests.worker_config import policy_file
from pdcluster_operator.plan.cluster import plan_cluster
from pdcluster_operator.plan.local import plan_local
from tests.operator.manifests.rendering import EVERYTHING, OWNER, SITE
from tests.operator.object_cases import CPU, at, minimal
from tests.operator.plan.clusters import NOW, condition_of, identity, running, workload

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
    return [workload(identity(REVISION, role), wanted, ready) for role, (wanted, ready) in sizes.items()]


def test_routers_answer_once_all_is_ready() -> None:
    plan = plan_cluster(CLUSTER, running(CLUSTER), NOW)

    assert plan.serving_role == "router"
    assert (plan.status["router"], plan.status["decode"], plan.status["prefill"]) == ("2/2", "1/1", "1/1")
    assert {kind: condition_of(plan.status, kind)["status"] for kind in (words.READY, words.ROUTER_READY, words.SERVING)} == {
        words.READY: "True",
        words.ROUTER_READY: "True",
        words.SERVING: "True",
    }
    assert condition_of(plan.status, words.INGRESS_READY)["message"] == "the Service leads to 2 ready router workers"
    assert {(scaler.role, scaler.pool) for scaler in plan.scalers} == {(role, "cpu") for role in ("prefill", "decode", "router")}
    assert {each.role for each in plan.budgets} >= {"router"}


@pytest.mark.parametrize(("routers", "decodes"), [(2, 0), (0, 1)])
def test_routers_without_decode_workers_answer_nothing_and_nothing_answers_without_routers(routers: int, decodes: int) -> None:
    plan = plan_cluster(CLUSTER, running(CLUSTER, workloads=states(routers, decodes)), NOW)

    serving = condition_of(plan.status, words.SERVING)
    assert serving["status"] == "False"
    assert "no router worker behind the Service is ready, or no decode worker behind routers is ready" in serving["message"]
    assert condition_of(plan.status, words.READY)["status"] == "False"


def test_routers_of_a_cluster_at_zero_are_as_declared() -> None:
    cluster = routed(spec__roles__decode={"pools": [{**CPU, "replicas": 0}]}, spec__roles__prefill={"pools": [{**CPU, "replicas": 0}]})
    status = plan_cluster(cluster, running(cluster), NOW).status

    assert condition_of(status, words.READY)["status"] == "True"
    assert condition_of(status, words.INGRESS_READY)["message"] == "the Service is there; no decode worker is declared"
    assert condition_of(status, words.SERVING)["status"] == "False"


def test_service_leads_to_routers_and_to_decode_workers_without_them() -> None:
    def selected(cluster: PDCluster) -> str:
        service = render_shared(cluster, OWNER, SITE, EVERYTHING, "r")[-1]
        role: str = service["spec"]["selector"]["pdcluster.io/role"]
        return role

    assert (selected(CLUSTER), selected(parse(minimal()))) == ("router", "decode")


def test_router_is_told_no_more_of_the_engine_than_it_needs() -> None:
    engine = CLUSTER.spec.engine_of("router")

    assert (engine.block_size, engine.threads) == (CLUSTER.spec.engine_of("decode").block_size, 0)
    assert policy_file(routed(spec__qos={"admission": {"workerWaitSeconds": 30}}))["admission"]["workerWaitSeconds"] == 30.0


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


def test_autoscaler_needs_no_ceiling_for_routers() -> None:
    bounded = {"pools": [{**CPU, "maxReplicas": 2}]}

    assert routed(spec__autoscale={"mode": "On"}, spec__roles__decode=bounded, spec__roles__prefill=bounded)
