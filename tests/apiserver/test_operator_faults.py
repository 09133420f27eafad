"""What a running operator says when it cannot do what it should, and that it recovers when it can."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_fixtures import operator_in
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_scene import DEADLINE_SECONDS, GROUP, Scene
from tests.apiserver.plain_api import Body, PlainApi
from tests.system.etcd_server import free_port
from tests.system.waiting import wait_for

NAMESPACE = "operator-faults"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def operator(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    with operator_in(control_plane, tmp_path_factory.mktemp("operator"), NAMESPACE) as process:
        yield process


@pytest.fixture
def scene(control_plane: ControlPlane, operator: OperatorProcess) -> Iterator[Scene]:
    api = PlainApi(control_plane.kubeconfig)
    with Nodes(api, NAMESPACE):
        found = Scene(api, NAMESPACE, f"chat-{next(_numbers)}")
        yield found
        found.delete()
        wait_for(lambda: not found.pods(), DEADLINE_SECONDS, "pods stay")


def test_a_name_that_is_taken_is_said_and_the_foreign_object_is_left_alone(scene: Scene):
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": scene.name},
        "spec": {"ports": [{"port": 80}], "selector": {"a": "b"}},
    }
    before = scene.api.create(scene.path("Service"), foreign)
    scene.create()
    found = scene.await_condition("Ready", "False", "NameTaken")
    assert f"Service {scene.name}" in found["message"]
    assert "delete it, or give the PDCluster another name" in found["message"]
    assert scene.condition("Stalled")["status"] == "True"
    after = scene.api.get(scene.path("Service", scene.name))
    assert after is not None
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    assert scene.children("StatefulSet")  # the rest is made
    scene.api.delete(scene.path("Service", scene.name))
    scene.await_condition("Ready", "True")


def test_a_quota_that_keeps_pods_from_being_made_is_said(scene: Scene):
    quota: Body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "2"}}}
    path = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
    scene.api.create(path, quota)
    wait_for(lambda: (scene.api.get(f"{path}/few") or {}).get("status", {}).get("hard"), DEADLINE_SECONDS, "the quota is not in force")
    try:
        scene.create()
        found = scene.await_condition("Ready", "False", "QuotaExceeded")
        assert "exceeded quota: few" in found["message"]
        assert scene.condition("Stalled")["status"] == "True"
    finally:
        scene.api.delete(f"{path}/few")
    # The StatefulSet controller backs off for long; a change of the workload wakes it.
    for role in ("prefill", "decode"):
        scene.api.merge(scene.path("StatefulSet", scene.workload(role)), {"metadata": {"annotations": {"wake": "up"}}})
    scene.api.merge(scene.path("StatefulSet", f"{scene.name}-etcd"), {"metadata": {"annotations": {"wake": "up"}}})
    scene.await_condition("Ready", "True")


def test_an_external_etcd_that_does_not_answer_is_said_and_one_that_does_is_taken(control_plane: ControlPlane, scene: Scene):
    dead = f"127.0.0.1:{free_port()}"
    scene.create(discovery={"etcd": {"endpoints": [dead]}})
    found = scene.await_condition("DiscoveryReady", "False", "EtcdUnreachable")
    assert dead in found["message"]
    assert scene.condition("Ready")["status"] == "False"
    assert f"{scene.name}-etcd" not in scene.children("StatefulSet")
    etcd = re.search(r"--etcd-servers=http://(\S+?)\x00", _command_line(control_plane.pid("kube-apiserver")))
    assert etcd is not None
    scene.change(discovery={"etcd": {"endpoints": [etcd[1]]}})
    scene.await_condition("DiscoveryReady", "True", "EtcdAnswers")
    scene.await_condition("Ready", "True")


def test_no_worker_is_made_before_the_etcds_secret_is_there(scene: Scene):
    scene.create(discovery={"etcd": {"endpoints": [f"127.0.0.1:{free_port()}"], "tlsSecret": "etcd-client"}})
    found = scene.await_condition("DiscoveryReady", "False", "EtcdUnreachable")
    assert "Secret etcd-client does not exist" in found["message"]
    assert (scene.children("StatefulSet"), scene.children("ControllerRevision")) == ({}, {})


def test_a_right_that_is_missing_is_said_and_the_rest_is_made(control_plane: ControlPlane, tmp_path: Path, namespace: str):
    rules = [
        {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": ["", "apps", "networking.k8s.io", "pdcluster.io", "events.k8s.io"], "resources": ["*"], "verbs": ["*"]},
    ]
    api = PlainApi(control_plane.kubeconfig)
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    role: Body = {"apiVersion": rbac[6:], "kind": "ClusterRole", "metadata": {"name": namespace}, "rules": rules}
    binding: Body = {
        "apiVersion": rbac[6:],
        "kind": "ClusterRoleBinding",
        "metadata": {"name": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": namespace},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "limited"}],
    }
    api.create(f"{rbac}/clusterroles", role)
    api.create(f"{rbac}/clusterrolebindings", binding)
    scene = Scene(api, namespace)
    try:
        with (
            OperatorProcess(tmp_path, control_plane.kubeconfig_for("limited"), PDCLUSTER_WATCH_NAMESPACES=namespace),
            Nodes(api, namespace),
        ):
            scene.create()
            found = scene.await_condition("Ready", "False", "Forbidden")
            assert "PodDisruptionBudget" in found["message"]
            assert "give it to the operator's ServiceAccount" in found["message"]
            scene.await_condition("Serving", "True")
            api.merge(f"{rbac}/clusterroles/{namespace}", {"rules": [*rules, {**rules[1], "apiGroups": ["policy"]}]})
            scene.await_condition("Ready", "True")
    finally:
        api.delete(f"{rbac}/clusterroles/{namespace}")
        api.delete(f"{rbac}/clusterrolebindings/{namespace}")


def test_a_spec_with_another_namespaces_name_is_not_served(control_plane: ControlPlane, operator: OperatorProcess, namespace: str):
    """The operator of this module watches one namespace."""
    scene = Scene(PlainApi(control_plane.kubeconfig), namespace)
    scene.create()
    operator.await_resyncs(1)
    assert (scene.everything(), scene.status) == ({}, {})
    assert control_plane.kubectl("get", "--raw", f"{GROUP}/namespaces/{namespace}/pdclusters")


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
