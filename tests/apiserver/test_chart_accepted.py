"""The chart on a real API server: installed, upgraded and removed by Helm, and its rights as the
API server grants them.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.apiserver.control_plane import ControlPlane, KubectlError
from tests.apiserver.granted_rights import assert_granted, operator_of
from tests.chart.helm_chart import CHART, HelmError, helm

Helm = Callable[..., str]
RELEASE = "pdc"
KINDS = "deployments,serviceaccounts,poddisruptionbudgets,roles,rolebindings,pdclusters"
FULL = {
    "replicas": 2,
    "sampleCluster": {"enabled": True},
    "image": {"registry": "registry.invalid"},
}


@pytest.fixture
def on_cluster(control_plane: ControlPlane, namespace: str) -> Iterator[Helm]:
    """Helm in the test's namespace; what is left at the end is uninstalled."""

    def run(*arguments: str, values: dict[str, Any] | None = None) -> str:
        return helm(
            *arguments,
            "--namespace",
            namespace,
            "--kubeconfig",
            str(control_plane.kubeconfig),
            values=values,
        )

    yield run
    run("uninstall", RELEASE, "--ignore-not-found")


def versions(control_plane: ControlPlane, namespace: str) -> dict[str, str]:
    """Everything that the release has made, with its generation, or its resourceVersion where it
    has none.
    """
    selector = f"--selector=app.kubernetes.io/instance={RELEASE}"
    texts = (
        control_plane.kubectl("get", KINDS, "--namespace", namespace, selector, "--output=json"),
        control_plane.kubectl("get", "clusterroles,clusterrolebindings", selector, "--output=json"),
    )
    items = [item for text in texts for item in json.loads(text)["items"]]
    return {
        f"{item['kind']}/{item['metadata']['name']}": item["metadata"].get("generation")
        or item["metadata"]["resourceVersion"]
        for item in items
    }


def test_chart_is_installed_upgraded_without_a_change_and_removed(
    control_plane: ControlPlane, namespace: str, on_cluster: Helm
) -> None:
    notes = on_cluster("install", RELEASE, str(CHART), values=FULL).partition("NOTES:")[2]
    before = versions(control_plane, namespace)
    on_cluster("upgrade", RELEASE, str(CHART), values=FULL)

    assert (
        f"looks after all namespaces.\n\n    kubectl -n {namespace} rollout status "
        f"deployment/{RELEASE}-pdcluster" in notes
    )
    assert "helm show crds CHART | kubectl apply --server-side --force-conflicts -f -" in notes
    assert "wait --for=condition=Ready pdc/chat" in notes
    assert {name.partition("/")[0] for name in before} == {
        *(
            "Deployment",
            "ServiceAccount",
            "PodDisruptionBudget",
            "Role",
            "RoleBinding",
            "ClusterRole",
            "ClusterRoleBinding",
            "PDCluster",
        )
    }
    assert versions(control_plane, namespace) == before

    on_cluster("uninstall", RELEASE, "--wait")
    assert versions(control_plane, namespace) == {}
    assert "pdclusters.pdcluster.io" in control_plane.kubectl(
        "get", "customresourcedefinitions", "--output=name"
    )


def test_pod_of_the_operator_meets_the_restricted_standard(
    control_plane: ControlPlane, namespace: str, on_cluster: Helm
) -> None:
    control_plane.kubectl(
        "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted"
    )
    on_cluster("install", RELEASE, str(CHART))
    (template,) = json.loads(
        control_plane.kubectl("get", "deployments", "--namespace", namespace, "--output=json")
    )["items"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "as-in-the-deployment", "namespace": namespace},
        "spec": template["spec"]["template"]["spec"],
    }

    assert "created" in control_plane.kubectl(
        "create", "--dry-run=server", "--filename=-", input=json.dumps(pod)
    )
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(KubectlError, match="violates PodSecurity"):
        control_plane.kubectl("create", "--dry-run=server", "--filename=-", input=json.dumps(pod))


GRANTED = {
    "list pdclusters.pdcluster.io --all-namespaces": True,
    "patch pdclusters.pdcluster.io --subresource=status --all-namespaces": True,
    "patch pdclusters.pdcluster.io --all-namespaces": False,
    "delete pdclusters.pdcluster.io --all-namespaces": False,
    "create statefulsets.apps --all-namespaces": True,
    "create pods --all-namespaces": False,
    "delete secrets --all-namespaces": False,
    "create roles.rbac.authorization.k8s.io --all-namespaces": False,
    "escalate clusterroles.rbac.authorization.k8s.io --all-namespaces": False,
    "create events.events.k8s.io --all-namespaces": True,
    "get nodes": False,
    "list namespaces": True,
    "list customresourcedefinitions.apiextensions.k8s.io": True,
}


def test_rights_as_the_api_server_grants_them(
    control_plane: ControlPlane, namespace: str, on_cluster: Helm
) -> None:
    on_cluster("install", RELEASE, str(CHART))

    assert_granted(control_plane, operator_of(namespace), GRANTED)


def test_rights_of_a_namespaced_install_end_there(
    control_plane: ControlPlane, namespace: str, on_cluster: Helm
) -> None:
    on_cluster("install", RELEASE, str(CHART), values={"watchNamespaces": [namespace]})

    expected = {
        f"create statefulsets.apps --namespace={namespace}": True,
        "create statefulsets.apps --namespace=default": False,
        "get secrets --namespace=default": False,
        f"update leases.coordination.k8s.io/{RELEASE}-pdcluster --namespace={namespace}": True,
        f"update leases.coordination.k8s.io/another --namespace={namespace}": False,
    }
    assert_granted(control_plane, operator_of(namespace), expected)


def test_users_with_the_role_edit_write_pdclusters(
    control_plane: ControlPlane, namespace: str, on_cluster: Helm
) -> None:
    on_cluster("install", RELEASE, str(CHART))
    control_plane.kubectl(
        "create",
        "rolebinding",
        "editors",
        "--namespace",
        namespace,
        "--clusterrole=edit",
        "--user=ann",
    )
    expected = {
        f"{verb} --namespace={namespace}": answer
        for verb, answer in {
            "create pdclusters.pdcluster.io": True,
            "delete pdclusters.pdcluster.io": True,
            "get pdpoolscalers.pdcluster.io": True,
            "update pdpoolscalers.pdcluster.io --subresource=scale": True,
            "update pdpoolscalers.pdcluster.io": False,
            "patch pdclusters.pdcluster.io --subresource=status": False,
        }.items()
    }
    assert_granted(control_plane, "ann", expected)


def test_sample_that_the_crd_refuses_is_refused_by_its_rule(on_cluster: Helm) -> None:
    spec = {
        "model": {"name": "m", "path": "/m"},
        "roles": {"prefill": {"pools": [{"name": "cpu", "replicas": 1}]}},
    }

    with pytest.raises(HelmError, match="must be exactly prefill"):
        on_cluster(
            "install",
            RELEASE,
            str(CHART),
            values={"sampleCluster": {"enabled": True, "spec": spec}},
        )
