"""An operator that comes after an older one, which ran an etcd in memory as a StatefulSet."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcluster_api.manifests.objects import Owner, new_object
from pdcluster_schema.labels import cluster_labels
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import DEADLINE_SECONDS, Scene
from tests.apiserver.plain_api import Body, PlainApi
from tests.system.waiting import wait_for

PEERS = [{"name": "peer", "port": 2380}]


@pytest.fixture
def plain(control_plane: ControlPlane, namespace: str) -> Iterator[Scene]:
    """A PDCluster that no operator has seen."""
    api = PlainApi(control_plane.kubeconfig)
    with Nodes(api, namespace):
        found = Scene(api, namespace)
        found.create()
        yield found


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
        plain.until(lambda: f"{name}-0" not in plain.pods())
