"""PodGroups of workers of several pods: said to be missing while their kind is not there, made once
it is, and gone with their workers.  The definitions have the fields that are used, of each project.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import DEADLINE_SECONDS, Scene
from tests.apiserver.plain_api import Body, PlainApi
from tests.system.waiting import wait_for

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
POOL = {"name": "wide", "replicas": 2, "podsPerReplica": 2}
QUEUED: dict[str, Any] = {"queue": {"type": "string"}}


def definition(group: str, version: str, **more: Any) -> Body:
    spec = {
        "type": "object",
        "properties": {"minMember": {"type": "integer", "minimum": 1}, **more},
    }
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"podgroups.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": group,
            "names": {"kind": "PodGroup", "plural": "podgroups"},
            "scope": "Namespaced",
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }


PLUGINS = definition("scheduling.x-k8s.io", "v1alpha1")
VOLCANO = definition("scheduling.volcano.sh", "v1beta1", **QUEUED)


@pytest.fixture
def scene(control_plane: ControlPlane, namespace: str) -> Iterator[Scene]:
    api = PlainApi(control_plane.kubeconfig)
    try:
        with Nodes(api, namespace):
            yield Scene(api, namespace)
    finally:
        for each in (PLUGINS, VOLCANO):
            api.delete(f"{DEFINITIONS}/{each['metadata']['name']}")


def groups(scene: Scene, definition: Body) -> dict[str, Any]:
    """Specs of the PodGroups, by what follows the workload's name."""
    spec = definition["spec"]
    path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/namespaces/{scene.namespace}"
    try:
        found = scene.api.get(f"{path}/podgroups") or {"items": []}
    except AssertionError as e:
        if "storage is (re)initializing" not in str(e):  # of a kind that is new
            raise
        return {}
    name = scene.workload("mixed", "wide")
    return {each["metadata"]["name"].removeprefix(name): each["spec"] for each in found["items"]}


@pytest.mark.parametrize(
    ("placement", "made", "spec"),
    [
        ({"gang": "PodGroup"}, PLUGINS, {"minMember": 2}),
        ({"gang": "Volcano", "queue": "gpus"}, VOLCANO, {"minMember": 2, "queue": "gpus"}),
    ],
)
def test_each_worker_has_a_pod_group_once_its_kind_is_there(
    control_plane: ControlPlane,
    scene: Scene,
    tmp_path: Path,
    placement: dict[str, str],
    made: Body,
    spec: dict[str, Any],
) -> None:
    scene.create(
        engine={"dataParallelSize": 2},
        roles={"mixed": {"pools": [POOL]}},
        placement=placement,
        rollout={"drainTimeoutSeconds": 1},
    )
    group = made["spec"]
    missing = f"no kind PodGroup ({group['group']}/{group['versions'][0]['name']})"
    with OperatorProcess(
        tmp_path, control_plane.kubeconfig, PDCLUSTER_WATCH_NAMESPACES=scene.namespace
    ) as operator:
        scene.await_condition("MixedReady", "True")  # they are made all the same
        wait_for(
            lambda: (
                f"{missing}; install its CRD, or remove placement.gang"
                in scene.await_condition("Ready", "False")["message"]
            ),
            DEADLINE_SECONDS,
            lambda: f"{scene.status} {operator.log_end}",
        )
        scene.api.create(DEFINITIONS, made)
        both = {"-0": spec, "-1": spec}
        wait_for(
            lambda: groups(scene, made) == both,
            2 * DEADLINE_SECONDS,
            lambda: f"{groups(scene, made)} {operator.log_end}",
        )
        scene.await_condition("Ready", "True")
        before = scene.settled_versions()
        assert scene.settled_versions() == before

        path = scene.path("PDPoolScaler", f"{scene.name}-mixed-wide")
        assert scene.api.merge(path, {"spec": {"replicas": 1}}) is not None
        wait_for(
            lambda: groups(scene, made) == {"-0": spec},
            2 * DEADLINE_SECONDS,
            lambda: f"{groups(scene, made)} {scene.status} {operator.log_end}",
        )
