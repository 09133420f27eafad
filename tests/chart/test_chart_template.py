"""Objects that the chart renders from its values."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from pdcluster_operator.settings import Settings
from pdctl.cli.render import CHART as SITE
from tests.chart.helm_chart import (
    CHART,
    NAMESPACE,
    RELEASE,
    ROOT,
    environment_of,
    helm,
    named,
    of_kind,
    only,
    pod_of,
    render,
)

FULL = {
    "image": {"registry": "registry.example.com:5000/team", "tag": "1.2", "pullPolicy": "Always"},
    "imagePullSecrets": ["first", "second"],
    "workerImage": {"registry": "registry.example.com:5000/team", "repository": "gpu/worker"},
    "etcdImage": "registry.example.com:5000/etcd:v3.6.6",
    "clusterDomain": "k8s.example.org",
    "replicas": 2,
    "watchNamespaces": ["models", "research"],
    "resyncSeconds": 60,
    "watchSilenceSeconds": 30,
    "concurrency": 8,
    "logLevel": "debug",
    "logFormat": "json",
    "deleteLostPods": True,
    "podLabels": {"team": "ml"},
    "podAnnotations": {"note": "yes"},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "infra", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "priorityClassName": "system-cluster-critical",
    "resources": {"limits": {"memory": "1Gi"}},
    "serviceAccount": {"annotations": {"owner": "me"}},
    "monitoring": {
        "podMonitors": True,
        "alerts": True,
        "interval": "10s",
        "labels": {"release": "prometheus"},
    },
    "sampleCluster": {"enabled": True, "name": "first"},
}
IMAGE = "pdcluster-operator:0.1.0"
# By Kubernetes in every pod, and by a user outside of one.
SET_ELSEWHERE = {"KUBERNETES_SERVICE_HOST", "KUBECONFIG"}


class Recorder(Mapping[str, str]):
    """An environment that remembers what was asked for."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values_, self.requested = values, set[str]()

    def __getitem__(self, name: str) -> str:
        self.requested.add(name)
        return self.values_[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


def test_chart_passes_strict_lint() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))


def test_chart_environment_is_what_settings_reads() -> None:
    given = {
        name: value if isinstance(value, str) else "from-the-pod"
        for name, value in environment_of(render(FULL)).items()
    }
    recorder = Recorder(given)
    settings = Settings.from_environment(recorder)

    assert recorder.requested - SET_ELSEWHERE == set(given)
    assert (settings.worker_image, settings.etcd_image) == (
        "registry.example.com:5000/team/gpu/worker:0.1.0",
        "registry.example.com:5000/etcd:v3.6.6",
    )
    assert settings.watch_namespaces == ("models", "research")
    assert (settings.lease_name, settings.cluster_domain) == (
        f"{RELEASE}-pdcluster",
        "k8s.example.org",
    )
    assert (settings.resync_seconds, settings.concurrency, settings.log_level) == (60, 8, 10)
    assert settings.log_format == "json"
    assert (settings.http_port, settings.leader_election, settings.identity) == (
        8080,
        True,
        "from-the-pod",
    )


def test_chart_defaults_are_those_of_settings() -> None:
    given = {
        name: value for name, value in environment_of(render()).items() if isinstance(value, str)
    }
    required = {
        name: given[f"PDCLUSTER_{name}"]
        for name in ("WORKER_IMAGE", "SERVER_IMAGE", "ETCD_IMAGE", "LEASE_NAME")
    }

    assert required == {
        "WORKER_IMAGE": "pdcluster-worker:0.1.0",
        "SERVER_IMAGE": "pdcluster-server:0.1.0",
        "ETCD_IMAGE": "quay.io/coreos/etcd:v3.6.6",
        "LEASE_NAME": f"{RELEASE}-pdcluster",
    }
    assert Settings.from_environment(given) == Settings.from_environment(
        {f"PDCLUSTER_{name}": value for name, value in required.items()}
    )


def test_every_namespaced_object_is_in_the_releases_or_a_watched_namespace() -> None:
    found = {(m["kind"], m["metadata"].get("namespace")) for m in render(FULL)}

    # which the roles of users take in
    cluster_wide = {kind for kind, namespace in found if namespace is None}
    assert cluster_wide == {"ClusterRole", "ClusterRoleBinding"}  # the latter to read nodes
    assert {namespace for _, namespace in found} == {None, NAMESPACE, "models", "research"}
    assert {kind for kind, namespace in found if namespace in ("models", "research")} == {
        "Role",
        "RoleBinding",
    }


def test_operator_pod_has_no_rights_on_its_node() -> None:
    pod = pod_of(render())
    (container,) = pod["containers"]

    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


def test_probes_and_metrics_are_on_the_port_that_the_operator_gets() -> None:
    manifests = render(FULL)
    (container,) = pod_of(manifests)["containers"]
    probes = {
        name: container[name]["httpGet"]
        for name in ("startupProbe", "livenessProbe", "readinessProbe")
    }

    assert container["ports"] == [
        {"name": "http", "containerPort": int(environment_of(manifests)["PDCLUSTER_HTTP_PORT"])}
    ]
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    assert {probe["port"] for probe in probes.values()} == {"http"}
    assert named(manifests, "PodMonitor", f"{RELEASE}-pdcluster")["spec"][
        "podMetricsEndpoints"
    ] == [
        # series of a PDCluster keep its namespace
        {"port": "http", "path": "/metrics", "interval": "10s", "honorLabels": True}
    ]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_second_replica_brings_a_budget_and_spreading(replicas: int) -> None:
    manifests = render({"replicas": replicas})

    assert only(manifests, "Deployment")["spec"]["replicas"] == replicas
    assert len(of_kind(manifests, "PodDisruptionBudget")) == replicas - 1
    assert ("topologySpreadConstraints" in pod_of(manifests)) is (replicas == 2)
    assert environment_of(manifests)["PDCLUSTER_LEADER_ELECTION"] == "true"


def test_everything_selects_the_operators_pods_and_no_others() -> None:
    manifests = render(FULL)
    deployment = only(manifests, "Deployment")["spec"]
    selector = {
        "app.kubernetes.io/name": "pdcluster-operator",
        "app.kubernetes.io/instance": RELEASE,
    }

    assert deployment["selector"]["matchLabels"] == selector
    assert selector.items() <= deployment["template"]["metadata"]["labels"].items()
    for selecting in (
        only(manifests, "PodDisruptionBudget"),
        named(manifests, "PodMonitor", f"{RELEASE}-pdcluster"),
    ):
        assert selecting["spec"]["selector"]["matchLabels"] == selector


def test_values_reach_the_pod() -> None:
    manifests = render(FULL)
    pod, template = pod_of(manifests), only(manifests, "Deployment")["spec"]["template"]["metadata"]
    (container,) = pod["containers"]

    assert (container["image"], container["imagePullPolicy"]) == (
        "registry.example.com:5000/team/pdcluster-operator:1.2",
        "Always",
    )
    assert pod["imagePullSecrets"] == [{"name": "first"}, {"name": "second"}]
    assert {
        name: pod[name] for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName")
    } == {
        name: FULL[name]
        for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName")
    }
    assert container["resources"]["limits"]["memory"] == "1Gi"
    assert (template["labels"]["team"], template["annotations"]) == ("ml", {"note": "yes"})
    assert only(manifests, "ServiceAccount")["metadata"]["annotations"] == {"owner": "me"}


def test_extra_variables_and_constraints_reach_the_pod() -> None:
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    own = {**spread, "labelSelector": {"matchLabels": {"mine": "yes"}}}
    pod = pod_of(
        render(
            {
                "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
                "topologySpreadConstraints": [spread, own],
            }
        )
    )
    first, second = pod["topologySpreadConstraints"]

    assert pod["containers"][0]["env"][-1] == {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    assert first["labelSelector"]["matchLabels"]["app.kubernetes.io/instance"] == RELEASE
    assert second == own


def test_test_of_the_release_asks_the_operators_health_with_its_own_image() -> None:
    manifests = render({"image": {"registry": "registry.example.com/team/"}})
    pod, service = only(manifests, "Pod"), only(manifests, "Service")
    (container,) = pod["spec"]["containers"]
    (operator,) = pod_of(manifests)["containers"]
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]

    assert {m["metadata"]["annotations"]["helm.sh/hook"] for m in (pod, service)} == {"test"}
    assert pod["metadata"]["name"] != name  # which a pod would resolve to itself
    assert f"http://{name}:{port}{operator['livenessProbe']['httpGet']['path']}" in str(container)
    assert container["image"] == operator["image"] == f"registry.example.com/team/{IMAGE}"
    assert service["spec"]["selector"].items() <= deployment_labels(manifests).items()
    assert not service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert container["securityContext"] == operator["securityContext"]


def test_service_of_the_test_has_a_legal_name_whatever_the_release_is_called() -> None:
    text = helm("template", f"4.{'r' * 51}", str(CHART), values={})
    service = only([each for each in yaml.safe_load_all(text) if each], "Service")

    assert re.fullmatch("[a-z][-a-z0-9]{0,61}[a-z0-9]", service["metadata"]["name"])


def deployment_labels(manifests: list[dict[str, Any]]) -> dict[str, str]:
    labels: dict[str, str] = only(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    return labels


def test_digest_comes_before_the_tag() -> None:
    digests = {
        key: f"sha256:{letter * 64}" for key, letter in (("image", "a"), ("workerImage", "b"))
    }
    manifests = render(
        {
            key: {"registry": "registry.example.com/team", "tag": "1.2", "digest": digest}
            for key, digest in digests.items()
        }
    )

    assert (
        pod_of(manifests)["containers"][0]["image"]
        == f"registry.example.com/team/pdcluster-operator@{digests['image']}"
    )
    server = environment_of(manifests)["PDCLUSTER_SERVER_IMAGE"]
    # of the workers' registry, unless it has its own
    assert server == "registry.example.com/team/pdcluster-server:0.1.0"
    worker = environment_of(manifests)["PDCLUSTER_WORKER_IMAGE"]
    assert worker == f"registry.example.com/team/pdcluster-worker@{digests['workerImage']}"


def test_names_that_look_like_numbers_stay_text() -> None:
    account = {"name": "789", "create": True}
    sample = {"enabled": True, "name": "1e3"}
    manifests = render(
        {**FULL, "watchNamespaces": ["456"], "serviceAccount": account, "sampleCluster": sample},
        "--namespace",
        "123",
    )
    subjects = [subject for manifest in manifests for subject in manifest.get("subjects", ())]

    assert {m["metadata"]["namespace"] for m in manifests if "namespace" in m["metadata"]} == {
        "123",
        "456",
    }
    assert {(subject["name"], subject["namespace"]) for subject in subjects} == {("789", "123")}
    assert (
        pod_of(manifests)["serviceAccountName"]
        == only(manifests, "ServiceAccount")["metadata"]["name"]
        == "789"
    )
    assert only(manifests, "PDCluster")["metadata"]["name"] == "1e3"


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("pdcluster", "pdcluster"),
        ("pdc", "pdc-pdcluster"),
        ("my-pdcluster", "my-pdcluster"),
        ("x" * 53, "x" * 52),
    ],
)
def test_objects_are_named_after_the_release(release: str, name: str) -> None:
    documents = yaml.safe_load_all(helm("template", release, str(CHART)))

    assert {
        document["metadata"]["name"] for document in documents if document["kind"] == "Deployment"
    } == {name}


@pytest.mark.parametrize(
    ("own", "name"), [("llm", "pdc-llm"), ("pdc", "pdc"), ("", "pdc-pdcluster")]
)
def test_name_of_your_own_takes_the_place_of_the_charts(own: str, name: str) -> None:
    assert only(render({"nameOverride": own}), "Deployment")["metadata"]["name"] == name


def test_service_account_of_your_own_is_used_everywhere() -> None:
    manifests = render(
        {"serviceAccount": {"create": False, "name": "mine"}, "watchNamespaces": ["models"]}
    )
    bindings = of_kind(manifests, "RoleBinding") + of_kind(manifests, "ClusterRoleBinding")

    assert of_kind(manifests, "ServiceAccount") == []
    assert pod_of(manifests)["serviceAccountName"] == "mine"
    assert {(s["name"], s["namespace"]) for binding in bindings for s in binding["subjects"]} == {
        ("mine", NAMESPACE)
    }


def test_sample_cluster_is_the_example_unless_a_spec_is_given() -> None:
    example = yaml.safe_load((ROOT / "examples" / "hugging-face.yaml").read_text())
    spec = {
        "model": {"name": "m", "path": "/m"},
        "roles": {"mixed": {"pools": [{"name": "cpu", "replicas": 1}]}},
    }
    given = only(render({"sampleCluster": {"enabled": True, "spec": spec}}), "PDCluster")
    sample = only(render(FULL), "PDCluster")

    assert of_kind(render(), "PDCluster") == []
    assert (sample["metadata"]["name"], sample["spec"]) == ("first", example["spec"])
    assert given["spec"] == spec


def test_pdctl_renders_as_the_operator_of_a_chart_with_its_own_values() -> None:
    variables = environment_of(render())
    names = ("PDCLUSTER_WORKER_IMAGE", "PDCLUSTER_ETCD_IMAGE", "PDCLUSTER_SERVER_IMAGE")
    images = [SITE.worker_image, SITE.etcd_image, SITE.server_image]

    assert images == [variables[name] for name in names]
    assert SITE.operator_namespace == NAMESPACE
