"""A running operator reports what it cannot do, and recovers when it can."""

import itertools
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pdcluster_api.certificates.authority import make_authority
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import DEADLINE_SECONDS, GROUP, Scene
from tests.apiserver.plain_api import Body, PlainApi
from tests.ports import free_port
from tests.system.waiting import wait_for

NAMESPACE = "operator-faults"
_numbers = itertools.count(1)


@pytest.fixture
def scene(control_plane: ControlPlane, operator: OperatorProcess, nodes: Nodes) -> Iterator[Scene]:
    found = Scene(PlainApi(control_plane.kubeconfig), NAMESPACE, f"chat-{next(_numbers)}")
    yield found
    found.delete()
    wait_for(lambda: not found.pods(), DEADLINE_SECONDS, "pods stay")


def test_a_quota_that_keeps_pods_from_being_made_is_reported(scene: Scene):
    quota: Body = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few"},
        "spec": {"hard": {"pods": "2"}},
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
    scene.api.create(path, quota)
    scene.until(lambda: (scene.api.get(f"{path}/few") or {}).get("status", {}).get("hard"))
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


def test_a_managed_etcd_on_a_lost_node_is_made_again_while_its_pod_never_ends(scene: Scene):
    scene.create()
    scene.await_condition("Ready", "True")
    (name,) = (name for name in scene.pods() if name.startswith(f"{scene.name}-etcd-"))
    path = f"/api/v1/namespaces/{scene.namespace}/pods/{name}"
    scene.api.merge(path, {"metadata": {"finalizers": ["example.com/lost"]}})
    try:
        scene.api.delete(path)
        scene.until(lambda: any("-etcd-" in each for each in scene.pods().keys() - {name}))
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
    scene.until(lambda: scene.children("StatefulSet"))
    scene.api.delete(scene.path("Secret", "etcd-client"))


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
