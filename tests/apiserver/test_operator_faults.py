"""A running operator reports what it cannot do, and recovers when it can."""

import itertools
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pdcluster_api.certificates.authority import make_authority
from pdcluster_schema.labels import COMPONENT
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.limited_user import limited_user
from tests.apiserver.nodeless import Nodes, Rule, ready, waiting
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import DEADLINE_SECONDS, GROUP, Scene
from tests.apiserver.plain_api import Body, PlainApi
from tests.ports import free_port
from tests.system.waiting import wait_for

NAMESPACE = "operator-faults"
_numbers = itertools.count(1)
UNPLACED: Body = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/1 nodes are available",
        }
    ],
    "containerStatuses": [],
}


@pytest.fixture
def scene(control_plane: ControlPlane, operator: OperatorProcess, nodes: Nodes) -> Iterator[Scene]:
    found = Scene(PlainApi(control_plane.kubeconfig), NAMESPACE, f"chat-{next(_numbers)}")
    yield found
    found.delete()
    wait_for(lambda: not found.pods(), DEADLINE_SECONDS, "pods stay")


def test_a_name_that_is_taken_is_reported_and_the_foreign_object_is_left_alone(scene: Scene):
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


def test_a_quota_that_keeps_pods_from_being_made_is_reported(scene: Scene):
    quota: Body = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few"},
        "spec": {"hard": {"pods": "2"}},
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
    scene.api.create(path, quota)
    wait_for(
        lambda: (scene.api.get(f"{path}/few") or {}).get("status", {}).get("hard"),
        DEADLINE_SECONDS,
        "the quota is not in force",
    )
    try:
        scene.create()
        found = scene.await_condition("Ready", "False", "QuotaExceeded")
        assert "exceeded quota: few" in found["message"]
        assert scene.condition("Stalled")["status"] == "True"
    finally:
        scene.api.delete(f"{path}/few")
    # The StatefulSet controller backs off for long; a change of the workload wakes it.
    for role in ("prefill", "decode"):
        scene.api.merge(
            scene.path("StatefulSet", scene.workload(role)),
            {"metadata": {"annotations": {"wake": "up"}}},
        )
    scene.api.merge(
        scene.path("Deployment", f"{scene.name}-etcd"),
        {"metadata": {"annotations": {"wake": "up"}}},
    )
    scene.await_condition("Ready", "True")


@pytest.mark.parametrize(
    ("kubelet", "reason", "says"),
    [
        (
            waiting("ErrImagePull", "no such image", "etcd"),
            "ImageNotPulled",
            "spec.discovery.etcd.image",
        ),
        (lambda pod: {**ready(pod), **UNPLACED}, "Unschedulable", "0/1 nodes are available"),
    ],
)
def test_a_managed_etcd_that_cannot_start_is_reported(
    scene: Scene, nodes: Nodes, kubelet: Rule, reason: str, says: str
):
    nodes.rule = lambda pod: (
        kubelet(pod) if pod["metadata"]["labels"].get(COMPONENT) == "etcd" else ready(pod)
    )
    scene.create()
    found = scene.await_condition("DiscoveryReady", "False", reason)
    assert f"pod {scene.name}-etcd-" in found["message"]
    assert says in found["message"]
    assert scene.await_condition("Ready", "False", reason)["message"].startswith("discovery: ")
    nodes.rule = ready
    scene.await_condition("Ready", "True")


def test_a_managed_etcd_on_a_lost_node_is_made_again_while_its_pod_never_ends(scene: Scene):
    scene.create()
    scene.await_condition("Ready", "True")
    (name,) = (name for name in scene.pods() if name.startswith(f"{scene.name}-etcd-"))
    path = f"/api/v1/namespaces/{scene.namespace}/pods/{name}"
    scene.api.merge(path, {"metadata": {"finalizers": ["example.com/lost"]}})
    try:
        scene.api.delete(path)
        wait_for(
            lambda: any("-etcd-" in each for each in scene.pods().keys() - {name}),
            DEADLINE_SECONDS,
            lambda: f"{scene.pods()}",
        )
        scene.await_condition("DiscoveryReady", "True")
        assert name in scene.pods()
    finally:
        scene.api.merge(path, {"metadata": {"finalizers": None}})


def test_an_external_etcd_that_does_not_answer_is_reported_and_one_that_does_is_taken(
    control_plane: ControlPlane, scene: Scene
):
    dead = f"127.0.0.1:{free_port()}"
    scene.create(discovery={"etcd": {"endpoints": [dead]}})
    found = scene.await_condition("DiscoveryReady", "False", "EtcdUnreachable")
    assert dead in found["message"]
    assert scene.condition("Ready")["status"] == "False"
    assert f"{scene.name}-etcd" not in scene.children("Deployment")
    etcd = re.search(
        r"--etcd-servers=http://(\S+?)\x00", _command_line(control_plane.pid("kube-apiserver"))
    )
    assert etcd is not None
    scene.change(discovery={"etcd": {"endpoints": [etcd[1]]}})
    scene.await_condition("DiscoveryReady", "True", "EtcdAnswers")
    scene.await_condition("Ready", "True")


def test_api_keys_that_no_client_can_have_are_reported_and_new_ones_are_seen(scene: Scene):
    secret: Body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "keys"},
        "stringData": {"alice": "sk-secret"},
    }
    scene.create(service={"apiKeySecret": "keys"})
    found = scene.await_condition("IngressReady", "False", "ConfigurationRefused")
    assert found["message"].startswith(
        "Secret keys of service.apiKeySecret does not exist: make it"
    )
    assert scene.await_condition("Ready", "False", "ConfigurationRefused")["message"].startswith(
        "ingress: Secret keys"
    )
    scene.api.create(scene.path("Secret"), secret)
    scene.await_condition("Ready", "True")
    scene.api.merge(scene.path("Secret", "keys"), {"data": None})
    found = scene.await_condition("IngressReady", "False", "ConfigurationRefused")
    assert "Secret keys of service.apiKeySecret holds no key" in found["message"]
    scene.api.merge(scene.path("Secret", "keys"), {"stringData": {"bob": "sk-secret"}})
    scene.await_condition("Ready", "True")
    scene.api.delete(scene.path("Secret", "keys"))
    scene.await_condition("Ready", "False", "ConfigurationRefused")
    assert "sk-secret" not in str(scene.status)


def test_no_worker_is_made_before_the_etcds_secret_is_there(scene: Scene):
    scene.create(
        discovery={"etcd": {"endpoints": [f"127.0.0.1:{free_port()}"], "tlsSecret": "etcd-client"}}
    )
    found = scene.await_condition("DiscoveryReady", "False", "EtcdUnreachable")
    assert "Secret etcd-client does not exist" in found["message"]
    assert (scene.children("StatefulSet"), scene.children("ControllerRevision")) == ({}, {})
    certificate = make_authority(datetime.now(UTC)).certificate.decode()
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "etcd-client"},
        "stringData": {"ca.crt": certificate},
    }
    scene.api.create(scene.path("Secret"), secret)
    wait_for(lambda: scene.children("StatefulSet"), DEADLINE_SECONDS, "no worker is made")
    scene.api.delete(scene.path("Secret", "etcd-client"))


def test_a_right_that_is_missing_is_reported_and_the_rest_is_made(
    control_plane: ControlPlane, tmp_path: Path, namespace: str
):
    rules = [
        {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "watch"]},
        {
            "apiGroups": ["", "apps", "networking.k8s.io", "pdcluster.io", "events.k8s.io"],
            "resources": ["*"],
            "verbs": ["*"],
        },
    ]
    api = PlainApi(control_plane.kubeconfig)
    scene = Scene(api, namespace)
    with (
        limited_user(control_plane, "limited", rules) as user,
        OperatorProcess(tmp_path, user.kubeconfig, PDCLUSTER_WATCH_NAMESPACES=namespace),
        Nodes(api, namespace),
    ):
        scene.create()
        found = scene.await_condition("Ready", "False", "Forbidden")
        assert "PodDisruptionBudget" in found["message"]
        assert "give it to the operator's ServiceAccount" in found["message"]
        scene.await_condition("Serving", "True")
        user.may([*rules, {**rules[1], "apiGroups": ["policy"]}])
        scene.await_condition("Ready", "True")


def test_a_spec_with_another_namespaces_name_is_not_served(
    control_plane: ControlPlane, operator: OperatorProcess, namespace: str
):
    """The operator of this module watches one namespace."""
    scene = Scene(PlainApi(control_plane.kubeconfig), namespace)
    scene.create()
    operator.await_resyncs(1)
    # what the CRD gives a new object
    assert (scene.everything(), scene.status) == ({}, {"observedGeneration": -1})
    assert control_plane.kubectl("get", "--raw", f"{GROUP}/namespaces/{namespace}/pdclusters")


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
