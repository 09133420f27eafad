"""A change that does not concern the objects changes nothing: no child is written, no pod is
replaced.

Every object of the cluster is compared by uid and resourceVersion where only
the operator writes, and by uid and generation where Kubernetes keeps a status.
"""

from collections.abc import Callable

import pytest

from e2e.harness import EXAMPLE, NAME, OPERATOR_NAMESPACE, RELEASE, SELECTOR, Kubernetes
from e2e.operator_at_work import let_the_operator_look, operator_pod
from tests.system.waiting import wait_for

WRITTEN_BY_THE_OPERATOR_ALONE = (
    "services,configmaps,secrets,serviceaccounts,networkpolicies,controllerrevisions"
)
WITH_STATUS = "statefulsets,pdb,pdps"


def children(cluster: Kubernetes) -> dict[str, tuple[str, str | None]]:
    """Every object that the operator made, and the pods: name -> what a write or a replacement
    would change.
    """
    seen: dict[str, tuple[str, str | None]] = {}
    for kinds, version in (
        (WRITTEN_BY_THE_OPERATOR_ALONE, "resourceVersion"),
        (WITH_STATUS, "generation"),
        ("pods", "uid"),
    ):
        for found in cluster.get(kinds, f"--selector={SELECTOR}")["items"]:
            metadata = found["metadata"]
            seen[f"{found['kind']}/{metadata['name']}"] = (metadata["uid"], metadata.get(version))
    return seen


def apply_twice(cluster: Kubernetes) -> None:
    for _ in range(2):
        cluster.kubectl("apply", f"--filename={EXAMPLE}")


def replace(cluster: Kubernetes) -> None:
    cluster.kubectl("replace", f"--filename={EXAMPLE}")


def apply_on_the_server(cluster: Kubernetes) -> None:
    cluster.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={EXAMPLE}")


def upgrade_the_release(cluster: Kubernetes) -> None:
    cluster.install_operator()


def restart_the_operator(cluster: Kubernetes) -> None:
    old = operator_pod(cluster)
    cluster.kubectl(
        "rollout", "restart", f"deployment/{RELEASE}", f"--namespace={OPERATOR_NAMESPACE}"
    )
    wait_for(lambda: operator_pod(cluster) not in ("", old), 120.0, "another operator to lead")


@pytest.mark.parametrize(
    "act", [apply_twice, replace, apply_on_the_server, upgrade_the_release, restart_the_operator]
)
def test_nothing_is_touched_by(chat: Kubernetes, act: Callable[[Kubernetes], None]) -> None:
    let_the_operator_look(chat)
    before = children(chat)
    assert {"Pod", "StatefulSet", "Service", "Secret", "ConfigMap", "PDPoolScaler"} <= {
        name.partition("/")[0] for name in before
    }

    act(chat)
    let_the_operator_look(chat)

    assert children(chat) == before
    assert chat.is_ready()


def test_changed_and_deleted_children_are_applied_again(chat: Kubernetes) -> None:
    service = chat.get(f"service/{NAME}")
    (decode,) = chat.get("statefulsets", f"--selector={SELECTOR},pdcluster.io/role=decode")["items"]
    name, pods = decode["metadata"]["name"], {pod["metadata"]["uid"] for pod in chat.pods()}

    chat.kubectl("delete", f"service/{NAME}")
    chat.kubectl("scale", f"statefulset/{name}", "--replicas=3")

    wait_for(
        lambda: chat.get(f"statefulset/{name}")["spec"]["replicas"] == 1,
        60.0,
        "the StatefulSet to get its replicas back",
    )
    wait_for(
        lambda: chat.kubectl("get", "service", NAME, "--ignore-not-found"),
        60.0,
        "the Service to be made again",
    )
    assert chat.get(f"service/{NAME}")["spec"]["selector"] == service["spec"]["selector"]
    wait_for(
        lambda: {pod["metadata"]["uid"] for pod in chat.pods()} == pods,
        180.0,
        "the earlier pods, and no others",
    )
