"""The merge of pod templates: as Kubernetes merges, and total."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_api.manifests.pod_template import merge_pod_template

BASE: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "serviceAccountName": "chat",
        "tolerations": [{"key": "gpu"}],
        "containers": [
            {
                "name": "worker",
                "image": "w:1",
                "command": ["python"],
                "env": [{"name": "HOME", "value": "/tmp"}, {"name": "A", "value": "1"}],
                "ports": [{"name": "http", "containerPort": 8000}],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                "livenessProbe": {"httpGet": {"path": "/health"}, "periodSeconds": 10},
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "topologySpreadConstraints": [
            {"topologyKey": "host", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 1}
        ],
    },
}


def spec(**fields: Any) -> dict[str, Any]:
    return {"spec": fields}


def worker(**fields: Any) -> dict[str, Any]:
    return spec(containers=[{"name": "worker", **fields}])


CASES: dict[str, tuple[dict[str, Any], str, Any]] = {
    "a map is merged": (
        {"metadata": {"labels": {"b": "2"}}},
        "metadata.labels",
        {"a": "1", "b": "2"},
    ),
    "a value is replaced": (spec(serviceAccountName="mine"), "spec.serviceAccountName", "mine"),
    "null removes": (
        spec(serviceAccountName=None),
        "spec",
        {key: BASE["spec"][key] for key in BASE["spec"] if key != "serviceAccountName"},
    ),
    "a plain list is replaced": (
        spec(tolerations=[{"key": "x"}]),
        "spec.tolerations",
        [{"key": "x"}],
    ),
    "a command is replaced": (worker(command=["sh"]), "spec.containers.0.command", ["sh"]),
    "a container is merged by name": (
        worker(image="w:2"),
        "spec.containers.0.env",
        BASE["spec"]["containers"][0]["env"],
    ),
    "a new container comes last": (
        spec(containers=[{"name": "side", "image": "s:1"}]),
        "spec.containers.1",
        {"name": "side", "image": "s:1"},
    ),
    "a variable by name": (
        worker(env=[{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]),
        "spec.containers.0.env",
        [
            {"name": "HOME", "value": "/tmp"},
            {"name": "A", "value": "2"},
            {"name": "B", "value": "3"},
        ],
    ),
    "a mount by its path": (
        worker(volumeMounts=[{"name": "fast", "mountPath": "/tmp"}]),
        "spec.containers.0.volumeMounts",
        [{"name": "fast", "mountPath": "/tmp"}],
    ),
    "a port by its number": (
        worker(ports=[{"containerPort": 8000, "hostPort": 80}]),
        "spec.containers.0.ports",
        [{"name": "http", "containerPort": 8000, "hostPort": 80}],
    ),
    "a spread by key and mode": (
        spec(
            topologySpreadConstraints=[
                {"topologyKey": "host", "whenUnsatisfiable": "DoNotSchedule"}
            ]
        ),
        "spec.topologySpreadConstraints",
        [
            *BASE["spec"]["topologySpreadConstraints"],
            {"topologyKey": "host", "whenUnsatisfiable": "DoNotSchedule"},
        ],
    ),
    "the same spread": (
        spec(
            topologySpreadConstraints=[
                {"topologyKey": "host", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 2}
            ]
        ),
        "spec.topologySpreadConstraints",
        [{"topologyKey": "host", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 2}],
    ),
    "another source of a volume": (
        spec(volumes=[{"name": "tmp", "hostPath": {"path": "/x"}}]),
        "spec.volumes",
        [{"name": "tmp", "hostPath": {"path": "/x"}}],
    ),
    "more of a volume's source": (
        spec(volumes=[{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]),
        "spec.volumes",
        [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}],
    ),
    "another action of a probe": (
        worker(livenessProbe={"exec": {"command": ["true"]}}),
        "spec.containers.0.livenessProbe",
        {"exec": {"command": ["true"]}, "periodSeconds": 10},
    ),
    "more of a probe's action": (
        worker(livenessProbe={"httpGet": {"port": 1}}),
        "spec.containers.0.livenessProbe",
        {"httpGet": {"path": "/health", "port": 1}, "periodSeconds": 10},
    ),
    "delete an item": (
        worker(env=[{"name": "A", "$patch": "delete"}]),
        "spec.containers.0.env",
        [{"name": "HOME", "value": "/tmp"}],
    ),
    "delete what is not there": (
        spec(volumes=[{"name": "no", "$patch": "delete"}]),
        "spec.volumes",
        BASE["spec"]["volumes"],
    ),
    "replace a map": (
        {"metadata": {"labels": {"$patch": "replace", "b": "2"}}},
        "metadata.labels",
        {"b": "2"},
    ),
    "delete a map": ({"metadata": {"labels": {"$patch": "delete"}}}, "metadata.labels", {}),
    "replace a list": (
        spec(volumes=[{"$patch": "replace"}, {"name": "b", "emptyDir": {}}]),
        "spec.volumes",
        [{"name": "b", "emptyDir": {}}],
    ),
    "replace an item": (
        worker(livenessProbe={"$patch": "replace", "periodSeconds": 1}),
        "spec.containers.0.livenessProbe",
        {"periodSeconds": 1},
    ),
    "an item without its key is left to the API server": (
        spec(volumes=[{"emptyDir": {}}]),
        "spec.volumes.1",
        {"emptyDir": {}},
    ),
    "no object is left to the API server": (spec(volumes=["tmp"]), "spec.volumes.1", "tmp"),
    "a wrong type is left to the API server": (
        spec(containers="worker"),
        "spec.containers",
        "worker",
    ),
    "new maps lose their nulls and directives": (
        spec(affinity={"a": None, "b": {"$patch": "replace", "c": 1}}),
        "spec.affinity",
        {"b": {"c": 1}},
    ),
}


def value_at(content: Any, path: str) -> Any:
    for part in path.split("."):
        content = content[int(part)] if part.isdigit() else content[part]
    return content


@pytest.mark.parametrize(("patch", "path", "expected"), CASES.values(), ids=CASES)
def test_merge(patch: dict[str, Any], path: str, expected: Any) -> None:
    base, given_patch = copy.deepcopy(BASE), copy.deepcopy(patch)

    assert value_at(merge_pod_template(base, given_patch), path) == expected
    assert (base, given_patch) == (BASE, patch)


def test_an_empty_template_changes_nothing() -> None:
    assert merge_pod_template(BASE, {}) == BASE


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["name", "containers", "env", "volumes", "ports", "$patch", "spec", "exec", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["metadata", "spec"]), JSON))
def test_merge_is_total_and_idempotent_for_plain_patches(patch: dict[str, Any]) -> None:
    once = merge_pod_template(BASE, patch)

    assert "$patch" not in once
    assert merge_pod_template(once, {}) == once
