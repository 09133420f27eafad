"""An operator that comes after an older one: what that made for each PDCluster, and the chart makes
for all now, is removed.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcluster_api.manifests.objects import Owner, new_object
from pdcluster_api.schema.labels import cluster_labels
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import DEADLINE_SECONDS, Scene
from tests.apiserver.plain_api import Body, PlainApi
from tests.system.waiting import wait_for

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GROUP = "monitoring.coreos.com"
PEERS = [{"name": "peer", "port": 2380}]


def definition(kind: str) -> Body:
    """One of the Prometheus operator's kinds, with any content."""
    plural = f"{kind.lower()}s"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{GROUP}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": GROUP,
            "names": {"kind": kind, "plural": plural},
            "scope": "Namespaced",
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }


@pytest.fixture
def plain(control_plane: ControlPlane, namespace: str) -> Iterator[Scene]:
    """A PDCluster that no operator has seen."""
    api = PlainApi(control_plane.kubeconfig)
    with Nodes(api, namespace):
        found = Scene(api, namespace)
        found.create()
        yield found


@pytest.fixture
def scene(control_plane: ControlPlane, namespace: str) -> Iterator[Scene]:
    """A PDCluster that no operator has seen, where the optional kinds exist."""
    api = PlainApi(control_plane.kubeconfig)
    kinds = ("PodMonitor", "PrometheusRule")
    for kind in kinds:
        api.create(DEFINITIONS, definition(kind))
    try:
        with Nodes(api, namespace):
            found = Scene(api, namespace)
            found.create()
            yield found
    finally:
        for kind in kinds:
            api.delete(f"{DEFINITIONS}/{kind.lower()}s.{GROUP}")


def test_monitoring_that_an_older_operator_made_for_a_pdcluster_is_removed(
    control_plane: ControlPlane, scene: Scene, tmp_path: Path, namespace: str
):
    owner, labels = (
        Owner(scene.name, namespace, scene.body["metadata"]["uid"]),
        cluster_labels(scene.name, "ingress"),
    )
    monitors = f"/apis/{GROUP}/v1/namespaces/{namespace}/podmonitors"
    older = {
        monitors: new_object(f"{GROUP}/v1/PodMonitor", "chat", owner, labels, spec={}),
        f"/apis/{GROUP}/v1/namespaces/{namespace}/prometheusrules": new_object(
            f"{GROUP}/v1/PrometheusRule", "chat", owner, labels, spec={}
        ),
        scene.path("ConfigMap"): new_object(
            "v1/ConfigMap", "chat-dashboard", owner, labels, data={"a.json": "{}"}
        ),
    }
    users = {
        "apiVersion": f"{GROUP}/v1",
        "kind": "PodMonitor",
        "metadata": {"name": "mine"},
        "spec": {},
    }
    for path, body in older.items():
        wait_for(
            lambda path=path: _is_served(scene.api, path), DEADLINE_SECONDS, f"{path} is not served"
        )
        scene.api.create(path, body)
    scene.api.create(monitors, users)
    with OperatorProcess(
        tmp_path,
        control_plane.kubeconfig,
        PDCLUSTER_WATCH_NAMESPACES=namespace,
        PDCLUSTER_REMOVE_OLDER_MONITORS="true",
    ) as operator:
        scene.await_condition("Ready", "True")
        for path, body in older.items():
            gone = f"{path}/{body['metadata']['name']}"
            wait_for(
                lambda gone=gone: scene.api.get(gone) is None,
                DEADLINE_SECONDS,
                lambda: operator.log_end,
            )
    assert [body["metadata"]["name"] for body in scene.api.items(monitors)] == ["mine"]


def _is_served(api: PlainApi, path: str) -> bool:
    try:
        return api.get(path) is not None
    except AssertionError:  # 429: the kind is being set up
        return False


def test_an_etcd_in_memory_that_an_older_operator_made_is_followed_by_a_deployment(
    control_plane: ControlPlane, plain: Scene, tmp_path: Path, namespace: str
):
    owner = Owner(plain.name, namespace, plain.body["metadata"]["uid"])
    labels, name = cluster_labels(plain.name, "etcd"), f"{plain.name}-etcd"
    pod = {"containers": [{"name": "etcd", "image": "example/etcd:0"}]}
    marks = {"pdcluster.io/cluster": plain.name, "app.kubernetes.io/component": "etcd"}
    spec: Body = {
        "replicas": 1,
        "serviceName": f"{name}-peers",
        "selector": {"matchLabels": marks},
        "template": {"metadata": {"labels": {**labels, **marks}}, "spec": pod},
    }
    record = f"{name}-44136fa3"
    older = [
        new_object(
            "apps/v1/ControllerRevision",
            record,
            owner,
            labels,
            revision=1,
            data={"statefulSet": {"spec": spec}},
        ),
        new_object("apps/v1/StatefulSet", name, owner, labels, spec=spec),
        new_object(
            "v1/Service", f"{name}-peers", owner, labels, spec={"clusterIP": "None", "ports": PEERS}
        ),
    ]
    for body in older:
        plain.api.create(plain.path(body["kind"]), body)
    with OperatorProcess(
        tmp_path, control_plane.kubeconfig, PDCLUSTER_WATCH_NAMESPACES=namespace
    ) as operator:
        plain.await_condition("Ready", "True")
        assert set(plain.children("Deployment")) == {name}
        left = {(body["kind"], body["metadata"]["name"]) for body in older}
        wait_for(
            lambda: not left & plain.everything().keys(), DEADLINE_SECONDS, lambda: operator.log
        )
        wait_for(
            lambda: f"{name}-0" not in plain.pods(), DEADLINE_SECONDS, lambda: f"{plain.pods()}"
        )
