"""A running operator creates the children of a PDCluster, and keeps them so."""

import base64
from collections.abc import Iterator

import pytest

from pdcluster_schema.labels import FIELD_MANAGER, MANAGED_BY, ROTATE_CA
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.operator_fixtures import ready_scene
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import Scene

NAMESPACE = "operator-children"


@pytest.fixture(scope="module")
def scene(control_plane: ControlPlane, operator: OperatorProcess) -> Iterator[Scene]:
    with ready_scene(control_plane, NAMESPACE) as found:
        yield found


def test_every_child_exists_with_owner_and_labels(scene: Scene):
    workloads = {scene.workload("prefill"), scene.workload("decode")}
    found = {
        kind: set(scene.children(kind))
        for kind in ("StatefulSet", "ControllerRevision", "ConfigMap", "Service", "Secret")
    }
    assert found["StatefulSet"] == workloads
    assert set(scene.children("Deployment")) == {"chat-etcd"}
    assert found["ControllerRevision"] >= workloads
    assert found["ConfigMap"] == {*workloads, "chat-policy"}
    assert found["Service"] >= {"chat", "chat-workers", "chat-etcd"}
    assert found["Secret"] == {"chat-pdc-ca", "chat-pdc-tls"}
    assert set(scene.children("PDPoolScaler")) == {"chat-prefill-cpu", "chat-decode-cpu"}
    assert set(scene.children("PodDisruptionBudget")) == workloads
    assert set(scene.children("NetworkPolicy")) == {"chat-pdc", "chat-pdc-etcd"}
    assert set(scene.children("ServiceAccount")) == {"chat-pdc"}
    for (kind, name), body in scene.everything().items():
        (owner,) = body["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (scene.body["metadata"]["uid"], True), (
            kind,
            name,
        )
        assert body["metadata"]["labels"][MANAGED_BY] == FIELD_MANAGER, (kind, name)


def test_the_steady_state_writes_nothing(scene: Scene, operator: OperatorProcess):
    operator.await_resyncs(1)  # what an earlier test changed has settled
    versions, writes = scene.versions(), operator.num_writes()
    operator.await_resyncs(2)
    assert scene.versions() == versions
    assert operator.num_writes() == writes


def test_the_process_writes_nothing_to_the_object_but_its_status(scene: Scene):
    metadata = scene.body["metadata"]
    assert "finalizers" not in metadata
    assert "annotations" not in metadata
    assert {
        each["manager"] for each in metadata["managedFields"] if each.get("subresource") == "status"
    } == {FIELD_MANAGER}


def test_a_requested_new_authority_is_accepted_with_the_old_and_rolls_nothing(
    scene: Scene, control_plane: ControlPlane
):
    other = Scene(scene.api, NAMESPACE, "rotated")
    other.create()
    other.await_condition("Ready", "True")
    pods, path = other.pods(), other.path("Secret", "rotated-pdc-tls")
    control_plane.kubectl("annotate", "--namespace", NAMESPACE, "pdc/rotated", f"{ROTATE_CA}=now")
    other.until(lambda: _num_authorities(other, path) == 2)
    events = other.until(lambda: _reasons(other, "Certificates"))
    assert events == ["moving to a new certificate authority, as asked"]
    assert other.pods() == pods
    other.delete()


def test_two_clusters_live_side_by_side_and_deleting_one_leaves_nothing_of_it(
    scene: Scene, operator: OperatorProcess
):
    other = Scene(scene.api, NAMESPACE, "other")
    other.create()
    other.await_condition("Ready", "True")
    kept = scene.versions()
    other.delete()
    other.until(lambda: not other.everything() and not other.pods())
    operator.await_resyncs(1)
    assert not other.everything()
    assert scene.versions() == kept


def _num_authorities(scene: Scene, path: str) -> int:
    secret = scene.api.get(path) or {"data": {"ca.crt": ""}}
    return base64.b64decode(secret["data"]["ca.crt"]).count(b"BEGIN CERTIFICATE")


def _reasons(scene: Scene, reason: str) -> list[str]:
    """Notes of the events about the cluster that have this reason."""
    events = scene.api.items(f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events")
    return [
        event["note"]
        for event in events
        if event["regarding"]["name"] == scene.name and event["reason"] == reason
    ]
