"""The operator with the chart's environment and the chart's rights, and no others: it does all of
its work and is refused nothing.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.granted_rights import assert_granted, operator_of
from tests.apiserver.operator_process import OperatorProcess
from tests.chart.helm_chart import CHART, ROOT, Manifest, environment_of, helm, render
from tests.system.waiting import wait_for

RELEASE = "pdc"
SECONDS = 60.0
CHILDREN = (
    "statefulsets,deployments,services,configmaps,secrets,serviceaccounts,controllerrevisions,"
)
CHILDREN += "poddisruptionbudgets,networkpolicies,pdpoolscalers"
OURS = "--selector=app.kubernetes.io/managed-by=pdcluster-operator"


class Cluster:
    """kubectl in the test's namespace."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self._control_plane, self._namespace = control_plane, namespace

    def kubectl(self, *arguments: str) -> str:
        return self._control_plane.kubectl("--namespace", self._namespace, *arguments)

    def items(self, kinds: str, *arguments: str) -> list[Manifest]:
        found: list[Manifest] = json.loads(self.kubectl("get", kinds, "--output=json", *arguments))[
            "items"
        ]
        return found

    def names(self, kinds: str) -> set[str]:
        return {f"{item['kind']}/{item['metadata']['name']}" for item in self.items(kinds, OURS)}


@pytest.fixture
def cluster(control_plane: ControlPlane, namespace: str) -> Cluster:
    return Cluster(control_plane, namespace)


def replicas_of_decode(cluster: Cluster) -> list[int]:
    found = cluster.items("statefulsets", "--selector=pdcluster.io/role=decode")
    return [item["spec"]["replicas"] for item in found]


def decode_workloads(cluster: Cluster) -> set[str]:
    return {
        item["metadata"]["name"]
        for item in cluster.items("statefulsets", "--selector=pdcluster.io/role=decode")
    }


def do_everything(cluster: Cluster, operator: OperatorProcess) -> None:
    """A cluster's life: created, scaled, drift reverted, rolled out, deleted."""
    cluster.kubectl("apply", "--filename", str(ROOT / "examples" / "chat.yaml"))
    made = {
        "Service/chat",
        "Service/chat-workers",
        "Deployment/chat-etcd",
        "Secret/chat-pdc-ca",
        "Secret/chat-pdc-tls",
        "PDPoolScaler/chat-decode-cpu",
    }
    wait_for(lambda: made <= cluster.names(CHILDREN), SECONDS, lambda: operator.log)
    wait_for(
        lambda: cluster.items("pdclusters")[0].get("status", {}).get("conditions"),
        SECONDS,
        lambda: operator.log,
    )

    (etcd,) = cluster.items("deployments", "--selector=app.kubernetes.io/component=etcd")
    place = etcd["metadata"]["namespace"]
    assert f"chat-etcd.{place}.svc.k8s.example.org:2379" in json.dumps(etcd["spec"]["template"])

    cluster.kubectl("scale", "pdpoolscalers/chat-decode-cpu", "--replicas=2")
    wait_for(lambda: replicas_of_decode(cluster) == [2], SECONDS, lambda: operator.log)
    wait_for(
        lambda: cluster.items("events", "--field-selector=involvedObject.kind=PDCluster"),
        SECONDS,
        lambda: operator.log,
    )
    (decode,) = decode_workloads(cluster)
    budget = f"PodDisruptionBudget/{decode}"
    cluster.kubectl("delete", "service/chat", budget, "--wait=false")
    wait_for(
        lambda: {"Service/chat", budget} <= cluster.names(CHILDREN), SECONDS, lambda: operator.log
    )
    before = decode_workloads(cluster)
    cluster.kubectl(
        "patch",
        "pdc/chat",
        "--type=merge",
        '--patch={"spec": {"rollout": {"strategy": "Recreate"}, "engine": {"maxSequences": 8}}}',
    )
    wait_for(
        lambda: len(found := decode_workloads(cluster)) == 1 and found.isdisjoint(before),
        SECONDS,
        lambda: f"{before}\n{operator.log}",
    )

    cluster.kubectl("delete", "pdc/chat", "--wait=true")
    wait_for(
        lambda: cluster.names(CHILDREN) == set(), SECONDS, lambda: str(cluster.names(CHILDREN))
    )


@pytest.mark.parametrize("is_namespaced", [False, True], ids=["everywhere", "in its namespace"])
def test_rights_of_the_chart_suffice(
    is_namespaced: bool,
    control_plane: ControlPlane,
    namespace: str,
    cluster: Cluster,
    tmp_path: Path,
) -> None:
    # Those of earlier tests may still be going, and in a namespace that is going every write is
    # refused.
    wait_for(
        lambda: control_plane.kubectl("get", "pdclusters", "-A", "-o", "name") == "",
        SECONDS,
        "no other PDCluster is left",
    )
    values: dict[str, Any] = {
        "watchNamespaces": [namespace] if is_namespaced else [],
        "clusterDomain": "k8s.example.org",
    }
    on_cluster = ("--namespace", namespace, "--kubeconfig", str(control_plane.kubeconfig))
    helm("install", RELEASE, str(CHART), *on_cluster, values=values)
    user = control_plane.kubeconfig_for(operator_of(namespace), "system:serviceaccounts")
    place = f"--namespace={namespace}"
    questions = (f"list pdclusters {place}", f"create leases {place}", f"list pods {place}")
    expected = {**dict.fromkeys(questions, True), "list namespaces": not is_namespaced}
    assert_granted(control_plane, operator_of(namespace), expected)
    given = {
        name: value
        for name, value in environment_of(render(values)).items()
        if isinstance(value, str)
    }

    try:
        settings = {
            **given,
            "POD_NAMESPACE": namespace,
            "PDCLUSTER_HTTP_PORT": "0",
            "PDCLUSTER_RESYNC_SECONDS": "10",
        }
        with OperatorProcess(tmp_path, user, **settings) as operator:
            do_everything(cluster, operator)
            refused = operator.metric("pdcluster_operator_api_calls_total", code="403")
            stopped = operator.stop()
            log = operator.log
        holder = cluster.items("leases")[0]["spec"]["holderIdentity"]
    finally:
        helm("uninstall", RELEASE, *on_cluster)

    assert (refused, stopped, holder) == (0, 0, "")
    assert re.findall(r".*(?:[Ff]orbidden|[Pp]ermission| ERROR ).*", log) == []
