"""An operator that comes after an older one: with an etcd in memory as a StatefulSet, or with
snapshots that lack the hashes by which it finds them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcluster_api.manifests.objects import Owner, new_object
from pdcluster_schema.labels import PAIR_HASH, ROLE_HASH, TEMPLATE_HASH, cluster_labels
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


@pytest.mark.parametrize("known", [[TEMPLATE_HASH], []], ids=["a hash of all roles", "no hash"])
def test_workers_of_an_older_operator_are_taken_over_without_a_pod_replaced(
    control_plane: ControlPlane, plain: Scene, tmp_path: Path, namespace: str, known: list[str]
):
    def operator() -> OperatorProcess:
        settings = {"PDCLUSTER_WATCH_NAMESPACES": namespace}
        return OperatorProcess(tmp_path, control_plane.kubeconfig, **settings)

    def snapshots() -> dict[str, Body]:
        found = plain.children("ControllerRevision")
        return {name: body["metadata"]["labels"] for name, body in found.items() if "-cpu-" in name}

    with operator():
        plain.await_condition("Ready", "True")
        plain.settled_versions()
    pods, labels = plain.pods(), snapshots()
    hashes = {PAIR_HASH, ROLE_HASH, TEMPLATE_HASH}
    unknown = dict.fromkeys(hashes.difference(known))
    for name in labels:
        path = plain.path("ControllerRevision", name)
        assert plain.api.merge(path, {"metadata": {"labels": unknown}}) is not None
    assert all(not hashes.difference(known) & each.keys() for each in snapshots().values())
    with operator() as process:
        wait_for(lambda: snapshots() == labels, DEADLINE_SECONDS, lambda: process.log)
        plain.await_condition("Ready", "True")
        plain.settled_versions()
        assert plain.pods() == pods

        plain.change(roles={"decode": {"engine": {"maxSequences": 32}}})
        plain.until(lambda: len(plain.children("StatefulSet")) == 3)
