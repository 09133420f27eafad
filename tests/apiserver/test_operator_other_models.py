"""A PDCluster whose address serves another one's model, under a running operator."""

from collections.abc import Iterator

import pytest
import yaml

from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import DEADLINE_SECONDS, Scene
from tests.apiserver.plain_api import PlainApi
from tests.system.waiting import wait_for

NAMESPACE = "other-models"
SMALL = {"model": {"name": "small", "path": "/models/small"}}


@pytest.fixture
def scenes(
    control_plane: ControlPlane, operator: OperatorProcess, nodes: Nodes
) -> Iterator[tuple[Scene, Scene]]:
    api = PlainApi(control_plane.kubeconfig)
    large, small = Scene(api, NAMESPACE, "large"), Scene(api, NAMESPACE, "small")
    yield large, small
    for each in (large, small):
        each.delete()
    wait_for(lambda: not large.pods() and not small.pods(), DEADLINE_SECONDS, "pods stay")


def test_a_cluster_that_comes_changes_and_goes_is_seen(scenes: tuple[Scene, Scene]) -> None:
    large, small = scenes
    large.create(service={"models": [{"name": "small", "cluster": "small"}]})
    large.await_condition("OtherModelsServed", "False", "ClusterMissing")
    large.await_condition("Ready", "True")
    pods = large.pods()
    policy = large.children("ConfigMap")["large-policy"]["data"]["policy.yaml"]
    assert yaml.safe_load(policy)["models"] == {"small": f"small.{NAMESPACE}.svc:8000"}

    small.create(**SMALL)
    large.await_condition("OtherModelsServed", "True")
    small.change(model={"name": "smaller"})
    found = large.await_condition("OtherModelsServed", "False", "ModelNotServed")
    assert "PDCluster small serves smaller" in found["message"]

    large.change(service={"models": [{"name": "smaller", "cluster": "small"}]})
    large.await_condition("OtherModelsServed", "True")
    small.delete()
    large.await_condition("OtherModelsServed", "False", "ClusterMissing")
    assert large.pods() == pods
