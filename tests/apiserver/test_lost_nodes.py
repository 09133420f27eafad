"""Pods of a lost node, with the chart's `deleteLostPods`.  Takes more than a minute, since only a
pod that should have ended that long ago is a lost one.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from pdcluster_api.plan.observed.pools import ENDING_SECONDS
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes, bind, leaving
from tests.apiserver.operator_fixtures import SELDOM, operator_in
from tests.apiserver.operator_stage import Scene
from tests.apiserver.plain_api import Body, PlainApi
from tests.system.waiting import wait_for

NODE = "/api/v1/nodes/lost-node"
UNREACHABLE = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
SECONDS = 150.0


def test_a_pod_that_does_not_end_is_replaced_once_its_node_is_given_up(
    control_plane: ControlPlane, tmp_path: Path
):
    namespace, api = "lost-nodes", PlainApi(control_plane.kubeconfig)
    settings = {"PDCLUSTER_DELETE_LOST_PODS": "true", "PDCLUSTER_RESYNC_SECONDS": SELDOM}
    with (
        operator_in(control_plane, tmp_path, namespace, **settings) as operator,
        Nodes(api, namespace),
    ):
        scene = Scene(api, namespace)
        scene.create(rollout={"gracePeriodSeconds": 10})
        scene.await_condition("Ready", "True")
        api.create(
            "/api/v1/nodes",
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "lost-node"}},
        )
        try:
            path = f"/api/v1/namespaces/{namespace}/pods/{scene.workload('decode')}-0"
            bind(api, path, "lost-node")
            api.delete(path)
            uid = found(api, path)["metadata"]["uid"]
            api.merge(
                f"{path}/status", {"status": leaving(found(api, path))}
            )  # as the node's controller has it

            def reason() -> str:
                return str(scene.condition("DecodeReady")["reason"])

            wait_for(lambda: reason() == "NodeLost", SECONDS, lambda: str(scene.status))
            assert found(api, path)["metadata"]["uid"] == uid  # the node answers
            api.merge(NODE, {"spec": {"taints": [UNREACHABLE]}})
            wait_for(
                lambda: found(api, path)["metadata"]["uid"] != uid,
                SECONDS,
                lambda: operator.log_end,
            )
            scene.await_condition("Ready", "True")
            events = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
            notes = [
                event["note"] for event in api.items(events) if event["reason"] == "LostPodDeleted"
            ]
            assert len(notes) == 1
            assert "its node lost-node is lost" in notes[0]
        finally:
            api.delete(NODE)


def test_a_pod_on_an_unreachable_node_is_replaced_within_its_grace_period(
    control_plane: ControlPlane, tmp_path: Path
):
    namespace, api = "unreachable-node", PlainApi(control_plane.kubeconfig)
    settings = {"PDCLUSTER_DELETE_LOST_PODS": "true", "PDCLUSTER_RESYNC_SECONDS": SELDOM}
    with (
        operator_in(control_plane, tmp_path, namespace, **settings) as operator,
        Nodes(api, namespace),
    ):
        scene = Scene(api, namespace)
        scene.create(rollout={"gracePeriodSeconds": 3600})
        scene.await_condition("Ready", "True")
        since = datetime.now(UTC) - timedelta(seconds=ENDING_SECONDS - 15)
        taint = {**UNREACHABLE, "timeAdded": since.strftime("%Y-%m-%dT%H:%M:%SZ")}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "lost-node"}}
        api.create("/api/v1/nodes", {**node, "spec": {"taints": [taint]}})
        try:
            path = f"/api/v1/namespaces/{namespace}/pods/{scene.workload('decode')}-0"
            bind(api, path, "lost-node")
            api.delete(path)
            uid = found(api, path)["metadata"]["uid"]
            api.merge(f"{path}/status", {"status": leaving(found(api, path))})

            wait_for(
                lambda: scene.condition("DecodeReady")["reason"] == "NodeLost",
                SECONDS,
                lambda: str(scene.status),
            )
            wait_for(
                lambda: found(api, path)["metadata"]["uid"] != uid,
                SECONDS,
                lambda: operator.log_end,
            )
            scene.await_condition("Ready", "True")
        finally:
            api.delete(NODE)


def found(api: PlainApi, path: str) -> Body:
    return api.get(path) or {"metadata": {"uid": None}}
