"""values.schema.json refuses what the chart does not know, with the value's name; and it knows all
that the chart has.
"""

import json
import re
from typing import Any

import pytest
import yaml

from tests.chart.helm_chart import CHART, HelmError, render

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())

REFUSED = {
    "unknown value": ({"replica": 2}, "Additional property replica is not allowed"),
    "unknown value within": (
        {"image": {"name": "x"}},
        "image: Additional property name is not allowed",
    ),
    "no replica": ({"replicas": 0}, "replicas: Must be greater than or equal to 1"),
    "more replicas than are of use": ({"replicas": 3}, "replicas: Must be less than or equal to 2"),
    "replicas as text": (
        {"replicas": "2"},
        "replicas: Invalid type. Expected: integer, given: string",
    ),
    "namespaces as text": (
        {"watchNamespaces": "models"},
        "watchNamespaces: Invalid type. Expected: array",
    ),
    "a namespace that is none": (
        {"watchNamespaces": ["Models"]},
        "watchNamespaces.0: Does not match pattern",
    ),
    "a namespace twice": (
        {"watchNamespaces": ["a", "a"]},
        "watchNamespaces: array items[0,1] must be unique",
    ),
    "deleteLostPods as text": (
        {"deleteLostPods": "yes"},
        "deleteLostPods: Invalid type. Expected: boolean, given: string",
    ),
    "log format": (
        {"logFormat": "xml"},
        'logFormat must be one of the following: "text", "json"',
    ),
    "log level": (
        {"logLevel": "INFO"},
        'logLevel must be one of the following: "debug", "info", "warning", "error"',
    ),
    "pull policy": (
        {"image": {"pullPolicy": "always"}},
        "image.pullPolicy must be one of the following",
    ),
    "registry with its protocol": (
        {"image": {"registry": "https://registry.example.com"}},
        "image.registry: Does not match pattern",
    ),
    "tag within the repository": (
        {"image": {"repository": "operator:1.0"}},
        "image.repository: Does not match pattern",
    ),
    "a tag that is a number": (
        {"workerImage": {"tag": 1.2}},
        "workerImage.tag: Invalid type. Expected: string",
    ),
    "a digest without its kind": (
        {"image": {"digest": "0" * 64}},
        "image.digest: Does not match pattern",
    ),
    "a digest that is cut off": (
        {"workerImage": {"digest": "sha256:12ab"}},
        "workerImage.digest: Does not match pattern",
    ),
    "enabled as text": ({"enabled": "true"}, "enabled: Invalid type. Expected: boolean"),
    "a domain that is none": (
        {"clusterDomain": "cluster_local"},
        "clusterDomain: Does not match pattern",
    ),
    "a domain with a label that is too long": (
        {"clusterDomain": f"{'a' * 64}.local"},
        "clusterDomain: Does not match pattern",
    ),
    "no etcd image": (
        {"etcdImage": ""},
        "etcdImage: String length must be greater than or equal to 1",
    ),
    "resync too often": (
        {"resyncSeconds": 1},
        "resyncSeconds: Must be greater than or equal to 10",
    ),
    "watches that are opened again all the time": (
        {"watchSilenceSeconds": 1},
        "watchSilenceSeconds: Must be greater than or equal to 5",
    ),
    "too many at a time": ({"concurrency": 1000}, "concurrency: Must be less than or equal to 64"),
    "interval without a unit": (
        {"monitoring": {"interval": "30"}},
        "monitoring.interval: Does not match pattern",
    ),
    "monitors by another word": (
        {"monitoring": {"podMonitors": "yes"}},
        "monitoring.podMonitors must be one of the following",
    ),
    "the older value": (
        {"podMonitor": {"enabled": True}},
        "Additional property podMonitor is not allowed",
    ),
    "sample that has no name": (
        {"sampleCluster": {"name": ""}},
        "sampleCluster.name: Does not match pattern",
    ),
    "resources of another kind": (
        {"resources": {"request": {"cpu": 1}}},
        "resources: Additional property request is not allowed",
    ),
    "memory in no unit of Kubernetes": (
        {"resources": {"limits": {"memory": "512MB"}}},
        "resources.limits.memory: Does not match pattern",
    ),
    "a variable that the chart sets": (
        {"extraEnv": [{"name": "PDCLUSTER_CONCURRENCY", "value": "8"}]},
        "extraEnv.0.name: Must not validate the schema (not)",
    ),
    "a variable twice": (
        {"extraEnv": [{"name": name, "value": name} for name in ("A", "NO_PROXY", "NO_PROXY")]},
        "extraEnv: NO_PROXY is there twice; give each name once",
    ),
    "a request over its limit": (
        {"resources": {"requests": {"cpu": "1500m"}}},
        "resources.requests.cpu: 1500m is over the limit of 1; lower it, or raise resources.limits"
        ".cpu",
    ),
    "a request over its limit, in other units": (
        {"resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "1000M"}}},
        "resources.requests.memory: 1Gi is over the limit of 1000M; lower it",
    ),
    "a variable without a name": ({"extraEnv": [{"value": "x"}]}, "extraEnv.0: name is required"),
    "a constraint without its key": (
        {"topologySpreadConstraints": [{"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}]},
        "topologySpreadConstraints.0: topologyKey is required",
    ),
    "a name that is none": ({"nameOverride": "Ours"}, "nameOverride: Does not match pattern"),
    "a misspelt section of the sample": (
        {"sampleCluster": {"spec": {"modell": {}}}},
        "sampleCluster.spec: Additional property modell is not allowed",
    ),
    "secret as an object": (
        {"imagePullSecrets": [{"name": "x"}]},
        "imagePullSecrets.0: Invalid type. Expected: string",
    ),
}


@pytest.mark.parametrize(("values", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_value_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError, match=re.escape(message)):
        render(values)


@pytest.mark.parametrize(
    "values", [{"global": {"anything": 1}}, {"enabled": True}, {"tags": {"serving": True}}]
)
def test_values_that_a_parent_chart_sets_for_helm_are_let_through(values: dict[str, Any]) -> None:
    assert render(values) == render()


def test_schema_is_strict_everywhere_and_knows_every_value() -> None:
    def compare(schema: dict[str, Any], values: dict[str, Any], path: str) -> None:
        assert schema["additionalProperties"] is False, path
        of_helm = {"global", "enabled", "tags"} if path == "values" else set()
        assert set(schema["properties"]) - of_helm == set(values), path
        for name, value in values.items():
            child = schema["properties"][name]
            if isinstance(value, dict) and "properties" in child and value:
                compare(child, value, f"{path}.{name}")

    compare(SCHEMA, VALUES, "values")


def test_sections_of_the_sample_are_those_of_a_pdcluster() -> None:
    crd = yaml.safe_load((CHART / "crds" / "pdcluster.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    sample = SCHEMA["properties"]["sampleCluster"]["properties"]["spec"]

    assert set(sample["properties"]) == set(spec["properties"])
