"""Sizes of pools: the scaler is the request, the file asks only when it changes."""

import itertools
from collections.abc import Iterator

import pytest

from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import SPEC, Scene
from tests.apiserver.plain_api import PlainApi
from tests.apiserver.registered import Registered
from tests.system.etcd_server import EtcdServer

_numbers = itertools.count(1)
NAMESPACE = "operator-scaling"
MANIFEST = """
apiVersion: pdcluster.io/v1alpha1
kind: PDCluster
metadata: {{name: {name}}}
spec:
  model: {{name: tiny, path: /models/tiny}}
  discovery: {{etcd: {{endpoints: ["{etcd}"]}}}}
  roles:
    prefill: {{pools: [{{name: cpu, replicas: 1}}]}}
    decode: {{pools: [{{name: cpu, replicas: {replicas}, minReplicas: 1, maxReplicas: 5}}]}}
"""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Etcd with the workers of all clusters."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.close()


@pytest.fixture
def scene(
    control_plane: ControlPlane, operator: OperatorProcess, etcd: EtcdServer
) -> Iterator[Scene]:
    """A ready cluster that came from a file; each test has its own."""
    api = PlainApi(control_plane.kubeconfig)
    name = f"chat-{next(_numbers)}"
    with Nodes(api, NAMESPACE), Registered(api, NAMESPACE, etcd):
        found = Scene(api, NAMESPACE, name)
        apply(control_plane, found, 2, etcd)
        found.await_condition("Ready", "True")
        yield found
        found.delete()


def apply(plane: ControlPlane, scene: Scene, replicas: int, etcd: EtcdServer) -> None:
    """The user's file, with so many decode workers."""
    text = MANIFEST.format(name=scene.name, replicas=replicas, etcd=etcd.endpoint)
    plane.kubectl("apply", "--namespace", NAMESPACE, "--filename", "-", input=text)


def await_size(scene: Scene, replicas: int) -> None:
    scene.until(lambda: scene.replicas("decode") == replicas)
    scene.await_condition("DecodeReady", "True")


def test_kubectl_scale_on_the_scaler_counts_and_the_unchanged_file_does_not_undo_it(
    control_plane: ControlPlane, scene: Scene, operator: OperatorProcess, etcd: EtcdServer
):
    scaler = f"pdps/{scene.name}-decode-cpu"
    control_plane.kubectl("scale", "--namespace", NAMESPACE, scaler, "--replicas=4")
    await_size(scene, 4)
    apply(control_plane, scene, 2, etcd)
    operator.await_resyncs(1)
    await_size(scene, 4)
    apply(control_plane, scene, 3, etcd)  # a change is a request like any other
    await_size(scene, 3)
    path = scene.path("PDPoolScaler", f"{scene.name}-decode-cpu")
    scene.until(lambda: (scene.api.get(path) or {})["status"]["replicas"] == 3)
    found = scene.children("PDPoolScaler")[f"{scene.name}-decode-cpu"]
    assert found["spec"]["replicas"] == 3
    assert scene.revision in found["status"]["selector"]


def test_a_pool_can_come_and_go_without_a_new_revision(scene: Scene, operator: OperatorProcess):
    revision, pods = scene.revision, scene.pods()
    both = [*SPEC["roles"]["prefill"]["pools"], {"name": "more", "replicas": 1}]
    scene.change(roles={"prefill": {"pools": both}})
    scene.await_condition("Ready", "True")
    assert scene.revision == revision
    assert scene.workload("prefill", "more") in scene.children("StatefulSet")
    scene.change(roles={"prefill": {"pools": both[:1]}})
    scene.until(lambda: scene.pods() == pods)
    assert f"{scene.name}-prefill-more" not in scene.children("PDPoolScaler")
    assert scene.workload("prefill", "more") not in scene.children("ControllerRevision")
