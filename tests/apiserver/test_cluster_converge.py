"""Children on the real API server: no drift where there is none, our fields reverted after any
edit, and those of others left.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from pdcluster_api.apiserver.kinds import (
    CHILD_OF_NAME,
    CONFIG_MAP,
    CONTROLLER_REVISION,
    POOL_SCALER,
)
from pdcluster_operator.writes.actions import ObjectName
from tests.apiserver import cluster_objects as objects
from tests.apiserver.cluster_client import Connection
from tests.apiserver.control_plane import ControlPlane, KubectlError
from tests.system.waiting import wait_for

Body = dict[str, Any]
STATEFUL = f"statefulset/{objects.WORKLOAD}"
RECORD = f"controllerrevision/{objects.WORKLOAD}"


@pytest.fixture
def kubectl(control_plane: ControlPlane, namespace: str) -> Callable[..., str]:
    return lambda *arguments: control_plane.kubectl("--namespace", namespace, *arguments)


def content(body: Body) -> Body:
    """A body without what changes with every write, and without what kubectl notes for itself."""
    kept = {key: body["metadata"].get(key) for key in ("name", "labels", "ownerReferences")}
    annotations = {
        key: value
        for key, value in body["metadata"].get("annotations", {}).items()
        if "kubectl" not in key
    }
    return {
        **{key: body[key] for key in body if key != "status"},
        "metadata": {**kept, "annotations": annotations},
    }


def controllers_are_done(kubectl: Callable[..., str]) -> bool:
    """Return whether StatefulSets and disruption budgets have the status that their controllers
    give them.
    """
    items = json.loads(kubectl("get", "statefulsets,poddisruptionbudgets", "--output", "json"))[
        "items"
    ]
    return all(
        item.get("status", {}).get("observedGeneration") == item["metadata"]["generation"]
        for item in items
    )


async def test_children_of_every_kind_are_made_and_then_left_alone(
    connection: Connection, owner: Body, kubectl: Callable[..., str]
):
    everything = objects.everything(owner)
    assert await connection.converge(owner, everything) == []
    wait_for(
        lambda: controllers_are_done(kubectl),
        30.0,
        "controllers write the status of what they watch",
    )
    writes = connection.writes
    assert await connection.actions(owner, everything) == []
    assert await connection.converge(owner, everything) == []
    assert connection.writes == writes


async def test_a_child_is_one_request(connection: Connection, owner: Body):
    before = connection.calls("get"), connection.writes
    await connection.converge(owner, objects.everything(owner))
    assert connection.writes - before[1] == len(objects.everything(owner))
    assert connection.calls("get") == before[0]


def patch(target: str, content: str, kind: str = "strategic") -> tuple[str, ...]:
    return ("patch", target, f"--type={kind}", "-p", content)


def in_pod(content: str) -> tuple[str, ...]:
    return patch(STATEFUL, f'{{"spec":{{"template":{{"spec":{content}}}}}}}')


BUDGET, POLICY = "poddisruptionbudget/chat-decode-cpu", "networkpolicy/chat"
SPREAD = '[{"op":"remove","path":"/spec/template/spec/topologySpreadConstraints"}]'
PORTS = '{"spec":{"ports":[{"name":"web","port":8000}]}}'
EDITS = {
    "env changed": ("set", "env", STATEFUL, "PLAIN=2"),
    "env removed": ("set", "env", STATEFUL, "PLAIN-"),
    "image": ("set", "image", STATEFUL, "worker=example/other:2"),
    "resources": ("set", "resources", STATEFUL, "--limits=cpu=2,memory=4Gi"),
    "scale": ("scale", STATEFUL, "--replicas=0"),
    "node selector": in_pod('{"nodeSelector":{"disk":"fast"}}'),
    "toleration": in_pod('{"tolerations":[{"operator":"Exists"}]}'),
    "volume removed": patch(STATEFUL, SPREAD, "json"),
    "service port": patch("service/chat", PORTS, "merge"),
    "service type": patch("service/chat", '{"spec":{"type":"NodePort"}}'),
    "service selector": ("set", "selector", "service/chat", "app=other"),
    "network policy": patch(POLICY, '{"spec":{"egress":[],"policyTypes":["Egress"]}}', "merge"),
    "policy opened": patch(POLICY, '{"spec":{"ingress":[{}]}}', "merge"),
    "budget": patch(BUDGET, '{"spec":{"maxUnavailable":2}}', "merge"),
    "data changed": patch("configmap/chat-policy", '{"data":{"policy.yaml":"x"}}'),
    "data removed": patch("configmap/chat-policy", '[{"op":"remove","path":"/data"}]', "json"),
    "made immutable": patch("configmap/chat-policy", '{"immutable":true}'),
    "label changed": ("label", "sa/chat", "app.kubernetes.io/instance=other", "--overwrite"),
    "label removed": ("label", "service/chat", "pdcluster.io/cluster-"),
    "our annotation": ("annotate", STATEFUL, "pdcluster.io/applied=x", "--overwrite"),
    "no managed fields": patch(STATEFUL, '{"metadata":{"managedFields":[{}]}}', "merge"),
}
MORE_PORTS = '{"spec":{"ports":[{"name":"more","port":1234}]}}'
ADDITIONS = {
    "env": ("set", "env", STATEFUL, "EXTRA=1"),
    "restart": ("rollout", "restart", STATEFUL),
    "annotation": ("annotate", "service/chat", "example.com/address-pool=public"),
    "label": ("label", STATEFUL, "team=search"),
    "sidecar": in_pod('{"containers":[{"name":"side","image":"x"}]}'),
    "fields": in_pod('{"hostIPC":true}'),
    "session affinity": patch("service/chat", '{"spec":{"sessionAffinity":"ClientIP"}}'),
    "port": patch("service/chat-workers", MORE_PORTS),
    "data": patch("configmap/chat-policy", '{"data":{"other.yaml":"x"}}'),
    "pull secret": patch("serviceaccount/chat", '{"imagePullSecrets":[{"name":"registry"}]}'),
    "client-side apply": ("apply", "--filename", "-"),
}


async def contents(connection: Connection, namespace: str) -> dict[ObjectName, Body]:
    return {
        ObjectName(body["kind"], body["metadata"]["name"]): content(body)
        for body in await connection.live(namespace)
    }


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
async def test_an_edit_by_hand_is_reverted(
    connection: Connection,
    owner: Body,
    control_plane: ControlPlane,
    namespace: str,
    edit: tuple[str, ...],
):
    everything = objects.everything(owner)
    await connection.converge(owner, everything)
    before = await contents(connection, namespace)
    control_plane.kubectl(
        "--namespace", namespace, *edit, input=json.dumps(_another_stateful_set(owner))
    )
    edited = await connection.actions(owner, everything)
    assert len(edited) == 1
    name = ObjectName(edited[0].kind.name, edited[0].name)
    assert await connection.converge(owner, everything) == []
    assert content(await connection.get(edited[0].kind, namespace, name.name)) == before[name]
    assert await connection.actions(owner, everything) == []


@pytest.mark.parametrize("edit", ADDITIONS.values(), ids=ADDITIONS.keys())
async def test_what_an_edit_by_hand_adds_is_left(
    connection: Connection,
    owner: Body,
    control_plane: ControlPlane,
    namespace: str,
    edit: tuple[str, ...],
):
    everything = objects.everything(owner)
    await connection.converge(owner, everything)
    before = await contents(connection, namespace)
    control_plane.kubectl(
        "--namespace", namespace, *edit, input=json.dumps(_another_stateful_set(owner))
    )
    after = await contents(connection, namespace)
    assert len([name for name in before if before[name] != after[name]]) == 1
    assert await connection.actions(owner, everything) == []


async def test_a_field_of_another_that_excludes_ours_is_a_failure_that_says_so(
    connection: Connection, owner: Body, kubectl: Callable[..., str]
):
    everything = objects.everything(owner)
    await connection.converge(owner, everything)
    kubectl(
        "patch",
        "poddisruptionbudget/chat-decode-cpu",
        "--type=merge",
        "-p",
        '{"spec":{"maxUnavailable":null,"minAvailable":1}}',
    )
    (failure,) = await connection.converge(owner, everything)
    assert (failure.object, failure.reason) == (
        "PodDisruptionBudget chat-decode-cpu",
        "ApplyFailed",
    )
    assert "minAvailable and maxUnavailable cannot be both set" in failure.message


def _another_stateful_set(owner: Body) -> Body:
    """Manifest of the workload in another user's file."""
    changed = objects.stateful_set(owner)
    changed["spec"]["template"]["spec"]["containers"][0]["env"].append(
        {"name": "MORE", "value": "1"}
    )
    del changed["metadata"]["ownerReferences"]
    return changed


async def test_what_we_no_longer_say_goes(connection: Connection, owner: Body):
    old = objects.config_map(owner)
    old["data"]["other.yaml"] = "x"
    old["metadata"]["labels"]["extra"] = "x"
    await connection.converge(owner, [old])
    await connection.converge(owner, [objects.config_map(owner)])
    live = await connection.get(CONFIG_MAP, owner["metadata"]["namespace"], "chat-policy")
    assert list(live["data"]) == ["policy.yaml"]
    assert "extra" not in live["metadata"]["labels"]


async def test_a_record_cannot_be_edited(
    connection: Connection, owner: Body, kubectl: Callable[..., str]
):
    await connection.converge(owner, [objects.record(owner)])
    with pytest.raises(KubectlError, match="field is immutable"):
        kubectl("patch", RECORD, "-p", '{"data":{"other":1}}')


@pytest.mark.parametrize(
    "value",
    [
        "<a href='x'>&amp;</a>",
        'é \u2028\u2029 \U0001f600 \x7f \x85 \ufeff \\ " \t\n\x01\b\f',
        [0.1, 1e21, 1e20, -1.5e-9, 1.0, -0.0, 5e-324],
        [2**53 + 1, 2**63 - 1, -(2**63), 10**20, 10**22],
        {"é": 1, "z": 2, "A": 3, "a": {"b": {}, "a": []}, "": 4, "<": 5},
        [None, {"a": [None, True, False]}],
    ],
    ids=["html", "text", "floats", "integers", "keys", "constants"],
)
async def test_labels_of_a_record_can_be_changed_whatever_it_holds(
    connection: Connection, owner: Body, kubectl: Callable[..., str], value: object
):
    desired = objects.record(owner)
    desired["data"]["awkward"] = value
    assert await connection.converge(owner, [desired]) == []
    for patch in ("merge", "strategic"):
        labels = f'{{"metadata":{{"labels":{{"added-by":"{patch}"}}}}}}'
        kubectl("patch", RECORD, "--type", patch, "-p", labels)
    kubectl("annotate", RECORD, "added=yes")
    kubectl("label", RECORD, "app.kubernetes.io/managed-by-")
    assert await connection.converge_knowing(owner, [desired], []) == []
    live = await connection.get(
        CONTROLLER_REVISION, owner["metadata"]["namespace"], objects.WORKLOAD
    )
    assert live["data"] == desired["data"]
    assert live["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "pdcluster-operator"


async def test_an_unknown_scaler_is_not_seeded(
    connection: Connection, owner: Body, kubectl: Callable[..., str]
):
    namespace = owner["metadata"]["namespace"]
    await connection.converge(owner, [objects.scaler(owner, replicas=5)])
    kubectl("label", "pdps/chat-decode-cpu", "app.kubernetes.io/managed-by-")
    assert await connection.converge_knowing(owner, [objects.scaler(owner, replicas=1)], []) == []
    live = await connection.get(POOL_SCALER, namespace, "chat-decode-cpu")
    assert live["spec"]["replicas"] == 5
    assert live["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "pdcluster-operator"


@pytest.mark.parametrize("make", [objects.secret, objects.record, objects.ingress_service])
async def test_a_child_that_lost_our_labels_is_found_again(
    connection: Connection, owner: Body, kubectl: Callable[..., str], make: Callable[[Body], Body]
):
    desired = make(owner)
    await connection.converge(owner, [desired])
    kind, name = CHILD_OF_NAME[desired["kind"]], desired["metadata"]["name"]
    before = await connection.get(kind, owner["metadata"]["namespace"], name)
    kubectl("label", f"{kind}/{name}", "app.kubernetes.io/managed-by-")
    assert await connection.converge_knowing(owner, [desired], []) == []
    assert content(await connection.get(kind, owner["metadata"]["namespace"], name)) == content(
        before
    )


@pytest.mark.parametrize(
    "make",
    [objects.config_map, objects.secret, objects.scaler],
)
async def test_an_object_of_another_owner_is_not_touched(
    connection: Connection,
    owner: Body,
    control_plane: ControlPlane,
    namespace: str,
    make: Callable[[Body], Body],
):
    theirs = make(owner)
    theirs["metadata"] = {
        "name": theirs["metadata"]["name"],
        "namespace": namespace,
        "labels": {"theirs": "yes"},
    }
    control_plane.kubectl("create", "--filename", "-", input=json.dumps(theirs))
    kind = CHILD_OF_NAME[theirs["kind"]]
    before = await connection.get(kind, namespace, theirs["metadata"]["name"])
    for known in ([], await connection.live(namespace)):
        failures = await connection.converge_knowing(owner, [make(owner)], known)
        assert [(failure.object, failure.reason) for failure in failures] == [
            (f"{kind} {theirs['metadata']['name']}", "NameTaken")
        ]
        assert "delete it, or give the PDCluster another name" in failures[0].message
    assert content(await connection.get(kind, namespace, theirs["metadata"]["name"])) == content(
        before
    )
    assert await connection.actions(owner, []) == []


async def test_text_is_stored_character_by_character(connection: Connection, owner: Body):
    text = "emoji \U0001f600, lines \u2028 \u2029 \x85, controls \x01 \x7f \x9f, mark \ufeff <&>\n"
    assert await connection.converge(owner, [objects.config_map(owner, text)]) == []
    namespace = owner["metadata"]["namespace"]
    stored = await connection.client.get(CONFIG_MAP, namespace, "chat-policy")
    assert stored["data"] == {"policy.yaml": text}
    assert await connection.actions(owner, [objects.config_map(owner, text)]) == []
