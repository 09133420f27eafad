"""Deleted objects are gone, and the others stay."""

from e2e.harness import NAME, OPERATOR_NAMESPACE, RELEASE, SELECTOR, Kubernetes
from tests.system.waiting import wait_for

END_SECONDS = 180.0


def namespaced_kinds(cluster: Kubernetes) -> str:
    """Every kind that can be listed in a namespace, so that nothing is overlooked."""
    names = cluster.kubectl(
        "api-resources", "--namespaced", "--verbs=list", "--output=name"
    ).split()
    return ",".join(name for name in names if not name.startswith("events"))


def test_deleted_object_leaves_nothing(chat: Kubernetes) -> None:
    kinds = namespaced_kinds(chat)
    assert len(chat.kubectl("get", kinds, f"--selector={SELECTOR}", "--output=name").split()) > 15

    chat.kubectl("delete", f"pdc/{NAME}")

    def left() -> str:
        by_label = chat.kubectl("get", kinds, f"--selector={SELECTOR}", "--output=name")
        names = chat.kubectl("get", kinds, "--output=name", "--ignore-not-found").split()
        return by_label + " ".join(
            name for name in names if name.partition("/")[2].startswith(f"{NAME}-")
        )

    wait_for(lambda: not left(), END_SECONDS, lambda: f"nothing to be left, but: {left()}")


def test_uninstalled_operator_leaves_workers_serving(chat: Kubernetes) -> None:
    pods = {pod["metadata"]["uid"] for pod in chat.pods()}

    chat.helm("uninstall", "--wait", RELEASE)

    kinds, selector = (
        "deployments,serviceaccounts,roles,rolebindings",
        "app.kubernetes.io/part-of=pdcluster",
    )
    place = f"--namespace={OPERATOR_NAMESPACE}"
    assert not chat.kubectl("get", kinds, place, f"--selector={selector}", "--output=name")
    assert not [
        name
        for name in chat.kubectl("get", "clusterroles,clusterrolebindings", "--output=name").split()
        if "pdcluster" in name
    ]
    (answer,) = chat.ask("ask", f"http://{NAME}:8000", "remote")
    assert "Paris" in answer["text"]
    chat.install_operator()
    wait_for(chat.is_ready, 120.0, "the operator that comes later to take the cluster over")
    assert {pod["metadata"]["uid"] for pod in chat.pods()} == pods
