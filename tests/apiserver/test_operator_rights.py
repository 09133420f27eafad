"""An operator that lacks a right says so, and goes on with all that it may do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pdcluster_api.apiserver.kinds import API_VERSION
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.limited_user import GROUPS, LimitedUser, all_of, limited_user
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import Scene
from tests.apiserver.plain_api import Body, PlainApi

OURS, CORE = (
    API_VERSION.partition("/")[0],
    ("pods", "services", "configmaps", "secrets", "serviceaccounts", "namespaces"),
)
READ = {
    "apiGroups": ["apiextensions.k8s.io"],
    "resources": ["*"],
    "verbs": ["get", "list", "watch"],
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


def test_without_the_right_to_list_events_pods_that_are_missing_stop_nothing(
    control_plane: ControlPlane, tmp_path: Path, namespace: str
):
    rules = [all_of(*GROUPS, OURS), all_of("", resources=CORE)]
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    with operator_with(control_plane, tmp_path, namespace, rules) as (_, _, scene):
        quota: Body = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "few"},
            "spec": {"hard": {"pods": "0"}},
        }
        scene.api.create(quotas, quota)
        scene.until(lambda: (scene.api.get(f"{quotas}/few") or {}).get("status", {}).get("hard"))
        scene.create()
        message = scene.await_condition("DecodeReady", "False", "PodsRefused")["message"]
        assert "pods are missing, and the events that say why cannot be read" in message
        assert 'cannot list resource "events"' in message
        scene.change(routing={"offload": {"prefillQueueMax": 17}})
        scene.await_condition("DecodeReady", "False", "PodsRefused")  # of the new generation
        policy = scene.api.get(scene.path("ConfigMap", "chat-policy"))
        assert policy is not None
        assert "17" in policy["data"]["policy.yaml"]


def test_without_the_right_to_a_scalers_status_the_status_says_so(
    control_plane: ControlPlane, tmp_path: Path, namespace: str
):
    rules = [
        all_of(*GROUPS, ""),
        all_of(OURS, resources=["pdclusters", "pdclusters/status", "pdpoolscalers"]),
    ]
    with operator_with(control_plane, tmp_path, namespace, rules) as (_, user, scene):
        scene.create()
        message = scene.await_condition("Ready", "False", "Forbidden")["message"]
        assert "status of PDPoolScaler chat-" in message
        assert "pdpoolscalers/status" in message
        scene.await_condition("Serving", "True")
        user.may([READ, *rules, all_of(OURS)])
        scene.await_condition("Ready", "True")
