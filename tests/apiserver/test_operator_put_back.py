"""Edits and deletions by hand are reverted, and the status reports them, without waiting for any
resync.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pdcluster_schema.conditions import CONDITIONS_FILE
from pdcluster_schema.labels import COMPONENT, MANAGED_BY
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes, ready
from tests.apiserver.operator_fixtures import SELDOM
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import Scene
from tests.apiserver.plain_api import PlainApi

NAMESPACE = "operator-put-back"
SETTINGS = {"PDCLUSTER_RESYNC_SECONDS": SELDOM}


@pytest.fixture(scope="module")
def nodes(control_plane: ControlPlane, operator: OperatorProcess) -> Iterator[Nodes]:
    with Nodes(PlainApi(control_plane.kubeconfig), NAMESPACE) as found:
        yield found


@pytest.fixture(scope="module")
def scene(control_plane: ControlPlane, nodes: Nodes) -> Scene:
    """A cluster that is ready; tests leave it so."""
    found = Scene(PlainApi(control_plane.kubeconfig), NAMESPACE)
    found.create()
    found.await_condition("Ready", "True")
    return found


@pytest.fixture
def no_more_nodes(scene: Scene, nodes: Nodes) -> Iterator[None]:
    """Workers that are new stay Pending; etcd's pod may still come back after the test before."""
    known = set(scene.pods().values())

    def rule(pod: dict[str, Any]) -> dict[str, Any] | None:
        metadata = pod["metadata"]
        may_run = metadata["uid"] in known or metadata["labels"].get(COMPONENT) == "etcd"
        return ready(pod) if may_run else None

    nodes.rule = rule
    yield
    nodes.rule = ready


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("StatefulSet", "{decode}"),
        ("Deployment", "chat-etcd"),
        ("ControllerRevision", "{decode}"),
        ("ConfigMap", "{decode}"),
        ("ConfigMap", "chat-policy"),
        ("Service", "chat"),
        ("Service", "chat-workers"),
        ("PodDisruptionBudget", "{decode}"),
        ("NetworkPolicy", "chat-pdc"),
        ("ServiceAccount", "chat-pdc"),
        ("PDPoolScaler", "chat-decode-cpu"),
        ("Secret", "chat-pdc-tls"),
    ],
)
def test_a_child_deleted_by_hand_is_made_again(scene: Scene, kind: str, name: str):
    path = scene.path(kind, name.format(decode=scene.workload("decode")))
    before = scene.api.get(path)
    assert before is not None
    pods = _workers(scene)
    scene.api.delete(path)
    after = scene.until(lambda: _another(scene.api.get(path), before))
    # A certificate and a cluster IP are new; a record of what runs has the API server's defaults
    # too.
    assert _content(after) == _content(before) or kind in (
        "Secret",
        "Service",
        "ControllerRevision",
    )
    scene.await_condition("Ready", "True")
    assert _workers(scene) == pods or kind == "StatefulSet"


@pytest.mark.parametrize(
    ("kind", "name", "edit"),
    [
        (
            "StatefulSet",
            "{decode}",
            {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 60}}}},
        ),
        (
            "Deployment",
            "chat-etcd",
            {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 60}}}},
        ),
        ("ConfigMap", "chat-policy", {"data": {"policy.yaml": "broken"}}),
        ("Service", "chat", {"spec": {"selector": {"pdcluster.io/revision": "00000000"}}}),
        ("PodDisruptionBudget", "{decode}", {"spec": {"minAvailable": 0}}),
        ("NetworkPolicy", "chat-pdc", {"spec": {"ingress": []}}),
        ("NetworkPolicy", "chat-pdc", {"metadata": {"labels": {MANAGED_BY: "me"}}}),
    ],
)
def test_a_child_edited_by_hand_is_reverted_and_no_pod_is_lost(
    scene: Scene, kind: str, name: str, edit: dict[str, Any]
):
    path = scene.path(kind, name.format(decode=scene.workload("decode")))
    before, pods = scene.api.get(path), _workers(scene)
    assert before is not None
    scene.api.merge(path, edit)
    scene.until(lambda: _content(scene.api.get(path)) == _content(before))
    scene.await_condition("Ready", "True")
    assert _workers(scene).items() >= pods.items()


def test_conditions_survive_edits_and_applies_of_the_policy_config_map(scene: Scene):
    path = scene.path("ConfigMap", "chat-policy")

    def copied() -> dict[str, str]:
        try:
            file = json.loads((scene.api.get(path) or {})["data"][CONDITIONS_FILE])
        except (KeyError, ValueError):
            return {}
        return {each["type"]: each["message"] for each in file["items"]}

    def written() -> dict[str, str]:
        return {each["type"]: each["message"] for each in scene.body["status"]["conditions"]}

    scene.until(lambda: copied() == written())
    before = _content(scene.api.get(path))
    scene.api.merge(path, {"data": {CONDITIONS_FILE: "broken", "policy.yaml": "broken"}})
    scene.until(lambda: copied() == written())
    scene.until(lambda: _content(scene.api.get(path)) == before)
    assert copied() == written()
    scene.api.delete(path)
    scene.until(lambda: copied() == written())


# a worker that has started would drain first, and on a busy machine some would start
@pytest.mark.usefixtures("no_more_nodes")
def test_a_stateful_set_scaled_by_hand_is_reverted_to_what_the_scaler_says(scene: Scene):
    path = scene.path("StatefulSet", scene.workload("decode"))
    scene.api.merge(path, {"spec": {"replicas": 4}})
    scene.until(lambda: scene.replicas("decode") == 2 and len(_workers(scene)) == 3)
    scene.await_condition("Ready", "True")


def test_a_scaler_that_is_made_again_has_its_status_at_once(scene: Scene):
    path = scene.path("PDPoolScaler", "chat-decode-cpu")
    before = scene.api.get(path)
    assert before is not None
    scene.api.delete(path)
    scene.until(lambda: _another(scene.api.get(path), before))

    def shown() -> int | None:
        found = scene.api.get(path) or {}
        return found.get("status", {}).get("replicas")

    scene.until(lambda: shown() == 2)


def _another(body: dict[str, Any] | None, before: dict[str, Any]) -> dict[str, Any] | None:
    return (
        body if body is not None and body["metadata"]["uid"] != before["metadata"]["uid"] else None
    )


def _workers(scene: Scene) -> dict[str, str]:
    """Uids of the workers' pods, by name.  The etcd may still be rolled for the test before."""
    return {name: uid for name, uid in scene.pods().items() if "etcd" not in name}


def _content(body: dict[str, Any] | None) -> Any:
    """Declared content of an object."""
    if body is None:
        return None
    data = {key: each for key, each in body.get("data", {}).items() if key != CONDITIONS_FILE}
    return {"spec": body.get("spec"), "data": data, "labels": body["metadata"]["labels"]}
