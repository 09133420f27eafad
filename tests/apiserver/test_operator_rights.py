"""An operator that lacks a right says so, and goes on with all that it may do."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdcluster_api.apiserver.kinds import API_VERSION
from tests.apiserver.control_plane import ControlPlane, KubectlError
from tests.apiserver.limited_user import GROUPS, LimitedUser, all_of, limited_user
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_scene import DEADLINE_SECONDS, Scene
from tests.apiserver.plain_api import Body, PlainApi
from tests.system.waiting import wait_for

OURS, CORE = API_VERSION.partition("/")[0], ("pods", "services", "configmaps", "secrets", "serviceaccounts", "namespaces")
MONITORING = all_of("monitoring.coreos.com")
READ = {"apiGroups": ["apiextensions.k8s.io"], "resources": ["*"], "verbs": ["get", "list", "watch"]}
POD_MONITORS: Body = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "podmonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "scope": "Namespaced",
        "names": {"plural": "podmonitors", "singular": "podmonitor", "kind": "PodMonitor", "listKind": "PodMonitorList"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


@contextmanager
def operator_with(
    control_plane: ControlPlane, folder: Path, namespace: str, rules: Sequence[Body]
) -> Iterator[tuple[OperatorProcess, LimitedUser, Scene]]:
    """An operator with these rights, and a PDCluster to be made."""
    api = PlainApi(control_plane.kubeconfig)
    with (
        limited_user(control_plane, f"limited-{namespace}", [READ, *rules]) as user,
        OperatorProcess(folder, user.kubeconfig, PDCLUSTER_WATCH_NAMESPACES=namespace) as process,
        Nodes(api, namespace),
    ):
        yield process, user, Scene(api, namespace)


@pytest.fixture
def pod_monitors(control_plane: ControlPlane) -> Iterator[str]:
    """The optional CRD; returns where its objects are."""
    crd = f"customresourcedefinition/{POD_MONITORS['metadata']['name']}"
    control_plane.kubectl("create", "--filename", "-", input=json.dumps(POD_MONITORS))
    try:
        wait_for(lambda: _answers(control_plane), DEADLINE_SECONDS, "the CRD is not served")
        yield "/apis/monitoring.coreos.com/v1/podmonitors"
    finally:
        control_plane.kubectl("delete", crd)


def test_without_the_right_to_list_events_pods_that_are_missing_stop_nothing(control_plane: ControlPlane, tmp_path: Path, namespace: str):
    rules = [all_of(*GROUPS, OURS), all_of("", resources=CORE)]
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    with operator_with(control_plane, tmp_path, namespace, rules) as (_, _, scene):
        quota: Body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "2"}}}
        scene.api.create(quotas, quota)
        wait_for(lambda: (scene.api.get(f"{quotas}/few") or {}).get("status", {}).get("hard"), DEADLINE_SECONDS, "no quota in force")
        scene.create()
        message = scene.await_condition("Ready", "False", "PodsRefused")["message"]
        assert "pods are missing, and the events that say why cannot be read" in message
        assert 'cannot list resource "events"' in message
        scene.change(routing={"offload": {"prefillQueueMax": 17}})
        scene.await_condition("Ready", "False", "PodsRefused")  # of the new generation
        policy = scene.api.get(scene.path("ConfigMap", "chat-policy"))
        assert policy is not None
        assert "17" in policy["data"]["policy.yaml"]


def test_without_the_right_to_a_scalers_status_the_status_says_so(control_plane: ControlPlane, tmp_path: Path, namespace: str):
    rules = [all_of(*GROUPS, ""), all_of(OURS, resources=["pdclusters", "pdclusters/status", "pdpoolscalers"])]
    with operator_with(control_plane, tmp_path, namespace, rules) as (_, user, scene):
        scene.create()
        message = scene.await_condition("Ready", "False", "Forbidden")["message"]
        assert "status of PDPoolScaler chat-" in message
        assert "pdpoolscalers/status" in message
        scene.await_condition("Serving", "True")
        user.may([READ, *rules, all_of(OURS)])
        scene.await_condition("Ready", "True")


def test_an_optional_kind_without_a_right_is_not_made_and_said_where_it_is_asked_for(
    control_plane: ControlPlane, tmp_path: Path, namespace: str, pod_monitors: str
):
    rules = [all_of(*GROUPS, OURS, "")]
    with operator_with(control_plane, tmp_path, namespace, rules) as (operator, _, scene):
        scene.create()
        message = scene.await_condition("Ready", "False", "Forbidden")["message"]
        assert message.startswith("PodMonitor chat: the operator may not list objects of this kind, so it makes none")
        scene.await_condition("Serving", "True")
        scene.change(monitoring={"podMonitor": False})
        scene.await_condition("Ready", "True")
        operator.await_resyncs(2)
        assert scene.api.items(pod_monitors) == []
        assert operator.log.count("the right is missing kind=PodMonitor") == 1
        assert operator.get("/healthz") == (200, "ok\n")


def test_with_the_right_the_optional_kind_is_made_and_put_back(
    control_plane: ControlPlane, tmp_path: Path, namespace: str, pod_monitors: str
):
    with operator_with(control_plane, tmp_path, namespace, [all_of(*GROUPS, OURS, ""), MONITORING]) as (_, _, scene):
        scene.create()
        scene.await_condition("Ready", "True")
        assert [body["metadata"]["name"] for body in scene.api.items(pod_monitors)] == ["chat"]


def _answers(control_plane: ControlPlane) -> bool:
    try:
        control_plane.kubectl("get", "podmonitors", "--all-namespaces")
    except KubectlError:  # it is being set up
        return False
    return True
