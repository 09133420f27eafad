"""Refusals and disturbances of the API server: no right, quota, conflict, restart."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdcluster_api.apiserver.client import ClientLimits
from pdcluster_api.apiserver.errors import ConflictError, NotFoundError, UnavailableError
from pdcluster_api.apiserver.kinds import CONFIG_MAP, POOL_SCALER, SERVICE, STATEFUL_SET
from pdcluster_operator.writes.apply import apply
from pdcluster_schema import conditions
from tests.apiserver import cluster_objects as objects
from tests.apiserver.cluster_client import Connection, connected
from tests.apiserver.control_plane import ControlPlane
from tests.operator.differences import diff
from tests.system.waiting import wait_for

Body = dict[str, Any]
QUICK = ClientLimits(timeout_seconds=2.0, tries=2, first_delay_seconds=0.05)


@pytest.fixture
def little_rights(control_plane: ControlPlane, namespace: str) -> Path:
    """A kubeconfig of a user who may do all with ConfigMaps here, and no more than look at the
    rest.
    """
    user = f"little-{namespace}"
    control_plane.kubectl(
        "-n", namespace, "create", "role", "little", "--verb=*", "--resource=configmaps"
    )
    control_plane.kubectl(
        "-n", namespace, "create", "role", "look", "--verb=get,list", "--resource=*.*,*"
    )
    for role in ("little", "look"):
        control_plane.kubectl(
            "-n", namespace, "create", "rolebinding", role, f"--role={role}", f"--user={user}"
        )
    return control_plane.kubeconfig_for(user)


async def test_a_missing_right_is_reported_and_stops_nothing_else(
    little_rights: Path, owner: Body, namespace: str
):
    async with connected(little_rights) as limited:
        failures = await limited.converge_knowing(
            owner, [objects.config_map(owner), objects.ingress_service(owner)], []
        )
        assert await limited.get(CONFIG_MAP, namespace, "chat-policy")
    [failure] = failures
    assert (failure.object, failure.reason) == ("Service chat", conditions.FORBIDDEN)
    assert f'User "little-{namespace}" cannot patch resource "services"' in failure.message
    assert "ClusterRole" in failure.message


async def test_the_certificate_has_to_be_of_the_name_in_the_kubeconfig(
    control_plane: ControlPlane, tmp_path: Path, namespace: str
):
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    path = tmp_path / "kubeconfig"
    for name in ("kubernetes.default.svc", "elsewhere.example"):
        config["clusters"][0]["cluster"]["tls-server-name"] = name
        path.write_text(yaml.safe_dump(config))
        async with connected(path, QUICK) as connection:
            asked = connection.get(CONFIG_MAP, namespace, "chat-policy")
            wrong = name == "elsewhere.example"
            with pytest.raises(UnavailableError if wrong else NotFoundError):
                await asked


async def test_a_used_up_quota_is_reported_with_its_name(
    connection: Connection, owner: Body, control_plane: ControlPlane, namespace: str
):
    control_plane.kubectl(
        "-n", namespace, "create", "quota", "small", "--hard=services=0,count/statefulsets.apps=0"
    )
    wait_for(
        lambda: (
            "services"
            in control_plane.kubectl(
                "-n", namespace, "get", "quota", "small", "-o", "jsonpath={.status.used}"
            )
        ),
        30.0,
        "the quota is counted",
    )
    failures = await connection.converge(
        owner,
        [objects.config_map(owner), objects.stateful_set(owner), objects.ingress_service(owner)],
    )
    assert [(failure.object, failure.reason) for failure in failures] == [
        ("Service chat", conditions.QUOTA_EXCEEDED),
        (f"StatefulSet {objects.WORKLOAD}", conditions.QUOTA_EXCEEDED),
    ]
    assert all("exceeded quota: small" in failure.message for failure in failures)
    assert await connection.get(CONFIG_MAP, namespace, "chat-policy")


async def test_a_field_that_does_not_exist_is_reported_with_its_path(
    connection: Connection, owner: Body
):
    wrong = objects.stateful_set(owner)
    wrong["spec"]["template"]["spec"]["hostNetworking"] = True
    [failure] = await connection.converge(owner, [wrong])
    assert failure.reason == conditions.APPLY_FAILED
    assert ".spec.template.spec.hostNetworking: field not declared in schema" in failure.message


async def test_a_field_that_cannot_change_is_reported(connection: Connection, owner: Body):
    await connection.converge(owner, [objects.stateful_set(owner)])
    other = objects.stateful_set(owner)
    other["spec"]["serviceName"] = "other"
    [failure] = await connection.converge(owner, [other])
    assert failure.reason == conditions.APPLY_FAILED
    assert "updates to statefulset spec for fields other than" in failure.message


async def test_an_object_made_again_meanwhile_is_decided_upon_again(
    connection: Connection, owner: Body, namespace: str
):
    await connection.converge(owner, [objects.config_map(owner, "old")])
    stale = await connection.live(namespace)
    before = await connection.get(CONFIG_MAP, namespace, "chat-policy")
    await connection.client.delete(
        CONFIG_MAP, namespace, "chat-policy", uid=before["metadata"]["uid"]
    )
    assert await connection.converge_knowing(owner, [objects.config_map(owner, "new")], stale) == []
    assert (await connection.get(CONFIG_MAP, namespace, "chat-policy"))["data"] == {
        "policy.yaml": "new"
    }
    # Now it is another object of the same name: what was decided about the old one does nothing to
    # it.
    assert await connection.converge_knowing(owner, [], stale) == []
    assert (
        await connection.converge_knowing(owner, [objects.config_map(owner, "newer")], stale) == []
    )
    assert (await connection.get(CONFIG_MAP, namespace, "chat-policy"))["data"] == {
        "policy.yaml": "newer"
    }


async def test_a_service_that_was_there_all_the_time_changes_after_the_stateful_sets(
    connection: Connection, owner: Body, control_plane: ControlPlane, namespace: str
):
    await connection.converge(owner, [objects.ingress_service(owner)])
    new = objects.ingress_service(owner, "4567cdef")
    assert await connection.converge_knowing(owner, [new, objects.stateful_set(owner)], []) == []
    service = await connection.get(SERVICE, namespace, "chat")
    assert service["spec"]["selector"] == new["spec"]["selector"]
    # at that revision, not now: Kubernetes' controllers write to a StatefulSet too
    revision = service["metadata"]["resourceVersion"]
    at_that_time = json.loads(
        control_plane.kubectl(
            "get",
            "--raw",
            f"/apis/apps/v1/namespaces/{namespace}/statefulsets"
            f"?resourceVersion={revision}&resourceVersionMatch=Exact",
        )
    )
    assert [item["metadata"]["name"] for item in at_that_time["items"]] == [objects.WORKLOAD]


async def test_a_scaler_that_is_gone_meanwhile_is_made_again(
    connection: Connection, owner: Body, namespace: str
):
    await connection.converge(owner, [objects.scaler(owner)])
    stale = await connection.live(namespace)
    before = await connection.get(POOL_SCALER, namespace, "chat-decode-cpu")
    await connection.client.delete(
        POOL_SCALER, namespace, "chat-decode-cpu", uid=before["metadata"]["uid"]
    )
    assert (
        await connection.converge_knowing(owner, [objects.scaler(owner, replicas=3, seen=3)], stale)
        == []
    )
    assert (await connection.get(POOL_SCALER, namespace, "chat-decode-cpu"))["spec"][
        "replicas"
    ] == 3
    # One that was made again is patched: the manifest still asks for it.
    assert (
        await connection.converge_knowing(owner, [objects.scaler(owner, replicas=4, seen=4)], stale)
        == []
    )
    assert (await connection.get(POOL_SCALER, namespace, "chat-decode-cpu"))["spec"][
        "replicas"
    ] == 4


async def test_an_object_that_goes_meanwhile_is_made_again(
    connection: Connection, owner: Body, control_plane: ControlPlane, namespace: str
):
    await connection.converge(owner, [objects.stateful_set(owner)])
    control_plane.kubectl(
        "-n", namespace, "set", "env", f"statefulset/{objects.WORKLOAD}", "PLAIN=2"
    )
    stale = await connection.live(namespace)
    control_plane.kubectl("-n", namespace, "delete", "statefulset", objects.WORKLOAD)
    assert await connection.converge_knowing(owner, [objects.stateful_set(owner)], stale) == []
    assert await connection.actions(owner, [objects.stateful_set(owner)]) == []


async def test_delete_of_another_object_of_the_name_is_a_conflict(
    connection: Connection, owner: Body, namespace: str
):
    await connection.converge(owner, [objects.config_map(owner)])
    with pytest.raises(ConflictError):
        await connection.client.delete(CONFIG_MAP, namespace, "chat-policy", uid="another")
    with pytest.raises(ConflictError):
        await connection.client.merge_patch(
            CONFIG_MAP, namespace, "chat-policy", {"metadata": {"uid": "another"}}
        )
    assert await connection.client.find(SERVICE, namespace, "nothing") is None
    with pytest.raises(NotFoundError):
        await connection.get(SERVICE, namespace, "nothing")
    await connection.client.delete(SERVICE, namespace, "nothing", uid="any")


async def test_apply_without_force_overwrites_no_other_writer(
    connection: Connection, owner: Body, control_plane: ControlPlane, namespace: str
):
    theirs = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "chat-policy"},
        "data": {"policy.yaml": "theirs"},
    }
    control_plane.kubectl(
        "-n", namespace, "apply", "--server-side", "-f", "-", input=json.dumps(theirs)
    )
    with pytest.raises(ConflictError, match="conflict with"):
        await connection.client.apply(CONFIG_MAP, objects.config_map(owner), force=False)


async def test_an_api_server_that_restarts_is_waited_for(own_plane: ControlPlane):
    patient = ClientLimits(
        timeout_seconds=2.0, tries=200, first_delay_seconds=0.05, max_delay_seconds=0.2
    )
    policy = objects.config_map(
        {"metadata": {"uid": "00000000-0000-0000-0000-000000000001", "namespace": "default"}}
    )
    async with (
        connected(own_plane.kubeconfig, patient) as waiting,
        connected(own_plane.kubeconfig, QUICK) as quick,
    ):
        await waiting.client.find(CONFIG_MAP, "default", "chat-policy")
        own_plane.stop()
        with pytest.raises(UnavailableError, match="the API server does not answer"):
            await quick.client.find(CONFIG_MAP, "default", "chat-policy")
        actions = diff(
            "00000000-0000-0000-0000-000000000001",
            [policy, objects.stateful_set(_owner_of(policy))],
            [],
        )
        with pytest.raises(UnavailableError):
            await apply(quick.client, actions)
        applying = asyncio.create_task(apply(waiting.client, actions))
        await asyncio.to_thread(_once_refused, waiting)
        own_plane.start()
        assert await applying == []
        assert (await quick.get(CONFIG_MAP, "default", "chat-policy"))["data"] == policy["data"]
        assert await quick.get(STATEFUL_SET, "default", objects.WORKLOAD)


def _owner_of(manifest: Body) -> Body:
    [reference] = manifest["metadata"]["ownerReferences"]
    return {"metadata": {"uid": reference["uid"], "namespace": manifest["metadata"]["namespace"]}}


def _once_refused(connection: Connection) -> None:
    """Return when a request has failed for want of a server."""
    wait_for(lambda: connection.unanswered > 0, 30.0, "a request that is not answered")
