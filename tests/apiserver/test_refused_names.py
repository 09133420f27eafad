"""Foreign names hold back what would use them; an older operator's names stay while in use."""

from typing import Any

import pytest

from pdcluster_api.manifests.child_names import older_names
from pdcluster_api.manifests.objects import Owner
from pdcluster_api.manifests.render import render_record
from pdcluster_api.schema.load import parse
from pdcluster_api.schema.revision import revision_of
from pdcluster_api.schema.workload import WorkloadId
from pdcluster_operator.reconcile.write_conflicts import MAX_WRITES
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.operator_stage import DEADLINE_SECONDS, Scene
from tests.apiserver.passes import passes_over
from tests.apiserver.plain_api import Body, PlainApi
from tests.system.waiting import wait_for

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
    wait_for(
        lambda: before not in scene.children("StatefulSet"), DEADLINE_SECONDS, f"{before} goes"
    )


def recorded_before(scene: Scene, body: Body) -> list[Body]:
    """The records of all workloads as an older operator made them."""
    cluster, owner = parse(body), Owner(scene.name, scene.namespace, body["metadata"]["uid"])
    ids = [
        WorkloadId(scene.name, role, "cpu", revision_of(cluster.spec))
        for role in ("prefill", "decode")
    ]
    return [
        render_record(cluster, each, owner, "example/worker:1", names=older_names(scene.name))
        for each in ids
    ]


async def test_what_an_older_operator_has_recorded_keeps_its_service_account_and_secrets(
    control_plane: ControlPlane, scene: Scene
):
    body = scene.create()
    for record in recorded_before(scene, body):
        scene.api.create(scene.path("ControllerRevision"), record)
    await pass_over(control_plane, scene)
    assert set(scene.children("ServiceAccount")) == {"chat", "chat-pdc"}
    assert set(scene.children("Secret")) == {"chat-ca", "chat-tls", "chat-pdc-ca", "chat-pdc-tls"}
    for role in ("prefill", "decode"):
        made = scene.children("StatefulSet")[scene.workload(role)]["spec"]["template"]["spec"]
        assert made["serviceAccountName"] == "chat"
        assert {"chat-tls"} == {
            each["secret"]["secretName"] for each in made["volumes"] if "secret" in each
        }
    generations = {
        name: made["metadata"]["generation"] for name, made in scene.children("StatefulSet").items()
    }
    await pass_over(control_plane, scene)
    assert {
        name: made["metadata"]["generation"] for name, made in scene.children("StatefulSet").items()
    } == generations

    old = scene.workload("decode")
    scene.change(rollout={"strategy": "Recreate"}, engine={"maxModelLen": 1024})
    for _ in range(3):  # the old ones go, then their records, then what only they used
        await pass_over(control_plane, scene)
    assert old not in scene.children("StatefulSet")
    assert set(scene.children("ServiceAccount")) == {"chat-pdc"}
    assert set(scene.children("Secret")) >= {
        "chat-ca",
        "chat-tls",
    }  # there is no right to delete a Secret
