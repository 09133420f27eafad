"""Foreign names hold back what would use them."""

from typing import Any

import pytest

from pdcluster_operator.reconcile.write_conflicts import MAX_WRITES
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.operator_stage import Scene
from tests.apiserver.passes import passes_over
from tests.apiserver.plain_api import PlainApi

FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "ServiceAccount": ("chat-pdc", {"apiVersion": "v1"}),
    "Secret": ("chat-pdc-tls", {"apiVersion": "v1", "stringData": {"tls.key": "of an Ingress"}}),
    "NetworkPolicy": (
        "chat-pdc",
        {
            "apiVersion": "networking.k8s.io/v1",
            "spec": {"podSelector": {}, "policyTypes": ["Egress"]},
        },
    ),
}


@pytest.fixture
def scene(control_plane: ControlPlane, namespace: str) -> Scene:
    return Scene(PlainApi(control_plane.kubeconfig), namespace)


async def pass_over(control_plane: ControlPlane, scene: Scene, number: int = 1) -> None:
    """Passes of an operator that starts, over what there is now.  number: of them at least"""
    async with passes_over(control_plane.kubeconfig, scene.namespace) as passes:
        for _ in range(number - 1):
            await passes.one()
        await passes.until_written()


@pytest.mark.parametrize("kind", FOREIGN)
async def test_nothing_that_would_use_a_foreign_object_is_made_until_it_is_gone(
    control_plane: ControlPlane, scene: Scene, kind: str
):
    name, body = FOREIGN[kind]
    scene.api.create(scene.path(kind), {"kind": kind, **body, "metadata": {"name": name}})
    scene.create()
    # what waits is not taken for something that is fought over
    await pass_over(control_plane, scene, MAX_WRITES + 2)
    found = scene.condition("Stalled")
    assert (found["status"], found["reason"]) == ("True", "NameTaken")
    assert found["message"].startswith(f"{kind} {name}: ")
    assert "delete it, or give the PDCluster another name" in found["message"]
    assert "no StatefulSet that would use it is made" in found["message"]
    # Certificates are the workers'; a policy is the workers' or etcd's; all pods run as the one
    # ServiceAccount.
    others = set() if kind == "ServiceAccount" else {"chat-etcd"}
    assert (scene.children("StatefulSet"), set(scene.children("Deployment"))) == ({}, others)
    assert name not in scene.children(kind)

    scene.api.delete(scene.path(kind, name))
    await pass_over(control_plane, scene)
    workers = {scene.workload("prefill"), scene.workload("decode")}
    assert set(scene.children("StatefulSet")) == workers
    assert set(scene.children("Deployment")) == {"chat-etcd"}
    assert scene.condition("Ready")["reason"] == "Starting"


async def test_nothing_of_what_runs_is_changed_or_deleted_for_a_foreign_object(
    control_plane: ControlPlane, scene: Scene
):
    scene.create()
    await pass_over(control_plane, scene)
    path = scene.path("NetworkPolicy", "chat-pdc")
    scene.api.delete(path)
    scene.api.create(
        scene.path("NetworkPolicy"),
        {"kind": "NetworkPolicy", **FOREIGN["NetworkPolicy"][1], "metadata": {"name": "chat-pdc"}},
    )
    before = scene.workload("decode")
    scene.change(rollout={"strategy": "Recreate"}, engine={"maxModelLen": 1024})
    await pass_over(control_plane, scene)
    assert scene.condition("Ready")["reason"] == "NameTaken"
    assert before in scene.children("StatefulSet")
    scene.api.delete(path)
    await pass_over(control_plane, scene)
    # Deleted in the foreground: it is there until the garbage collector has seen its pods go.
    scene.until(lambda: before not in scene.children("StatefulSet"))
