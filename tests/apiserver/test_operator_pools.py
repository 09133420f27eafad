"""An InferencePool for gateways: refused in plain words while its kind is not there, made once it
is.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import DEADLINE_SECONDS, Scene
from tests.apiserver.plain_api import PlainApi
from tests.system.waiting import wait_for

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GROUP = "inference.networking.k8s.io"
DEFINITION = yaml.safe_load(Path(__file__).with_name("inferencepool.yaml").read_text())
OWN = {"picker": {"pools": [{"name": "cpu", "replicas": 2}]}}


@pytest.fixture
def scene(control_plane: ControlPlane, namespace: str) -> Iterator[Scene]:
    """A PDCluster with an endpoint picker, where no InferencePool can be made yet."""
    api = PlainApi(control_plane.kubeconfig)
    try:
        with Nodes(api, namespace):
            found = Scene(api, namespace)
            found.create(service={"endpointPicker": {"name": "picker"}})
            yield found
    finally:
        kind = f"{DEFINITIONS}/inferencepools.{GROUP}"
        api.delete(kind)
        wait_for(lambda: api.get(kind) is None, DEADLINE_SECONDS, "the kind is gone")


def test_pool_is_made_once_its_kind_is_there(
    control_plane: ControlPlane, scene: Scene, tmp_path: Path, namespace: str
):
    path = f"/apis/{GROUP}/v1/namespaces/{namespace}/inferencepools/{scene.name}"

    def pool() -> Any:
        found = scene.api.get(path)
        return found and found["spec"]

    with OperatorProcess(
        tmp_path, control_plane.kubeconfig, PDCLUSTER_WATCH_NAMESPACES=namespace
    ) as operator:
        refused = scene.await_condition("Ready", "False")
        wait_for(
            lambda: "no kind InferencePool" in str(scene.body["status"]["conditions"]),
            DEADLINE_SECONDS,
            lambda: f"{refused} {operator.log_end}",
        )
        scene.api.create(DEFINITIONS, DEFINITION)
        wait_for(pool, DEADLINE_SECONDS, lambda: operator.log_end)
        service = scene.api.get(f"/api/v1/namespaces/{namespace}/services/{scene.name}")
        assert service is not None
        assert pool() == {
            "selector": {"matchLabels": service["spec"]["selector"]},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {
                "group": "",
                "kind": "Service",
                "name": "picker",
                "port": {"number": 9002},
                "failureMode": "FailClose",
            },
        }
        scene.await_condition("Ready", "True")


def test_own_picker_has_a_service_and_the_pool_of_decode_workers(
    control_plane: ControlPlane, scene: Scene, tmp_path: Path, namespace: str
):
    scene.api.create(DEFINITIONS, DEFINITION)
    path = f"/apis/{GROUP}/v1/namespaces/{namespace}/inferencepools/{scene.name}"
    scene.change(roles=OWN, service={"endpointPicker": {"name": None}})
    with OperatorProcess(
        tmp_path, control_plane.kubeconfig, PDCLUSTER_WATCH_NAMESPACES=namespace
    ) as operator:
        pool = wait_for(lambda: scene.api.get(path), DEADLINE_SECONDS, lambda: operator.log_end)
        scene.await_condition("PickerReady", "True")
        service = scene.api.get(scene.path("Service", f"{scene.name}-picker"))
    assert pool["spec"]["selector"] == {
        "matchLabels": {"pdcluster.io/cluster": scene.name, "pdcluster.io/role": "decode"}
    }
    assert pool["spec"]["endpointPickerRef"]["name"] == f"{scene.name}-picker"
    assert service is not None
    assert service["spec"]["selector"] == {
        "pdcluster.io/cluster": scene.name,
        "pdcluster.io/role": "picker",
        "pdcluster.io/revision": scene.revision,
    }
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (9002, 9002)
