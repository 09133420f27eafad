"""What does not change the object changes nothing: not one child is written, not one pod is replaced.

Every object of the cluster is compared by uid and resourceVersion where only
the operator writes, and by uid and generation where Kubernetes keeps a status.
"""

import uuid
from collections.abc import Callable
from functools import partial

import pytest

from e2e.harness import EXAMPLE, NAME, OPERATOR_NAMESPACE, RELEASE, SELECTOR, Kubernetes
from tests.system.waiting import wait_for

WRITTEN_BY_THE_OPERATOR_ALONE = "services,configmaps,secrets,serviceaccounts,networkpolicies,controllerrevisions"
WITH_STATUS = "statefulsets,pdb,pdps"
OPERATOR = "app.kubernetes.io/component=operator"
RECONCILES = "pdcluster_operator_reconcile_seconds_count"


def children(cluster: Kubernetes) -> dict[str, tuple[str, str | None]]:
    """Every object that the operator made, and the pods: name -> what a write or a replacement would change."""
    seen: dict[str, tuple[str, str | None]] = {}
    for kinds, version in ((WRITTEN_BY_THE_OPERATOR_ALONE, "resourceVersion"), (WITH_STATUS, "generation"), ("pods", "uid")):
        for found in cluster.get(kinds, f"--selector={SELECTOR}")["items"]:
            metadata = found["metadata"]
            seen[f"{found['kind']}/{metadata['name']}"] = (metadata["uid"], metadata.get(version))
    return seen


def operator_pod(cluster: Kubernetes) -> str:
    """Name of the operator that leads, once the one before is gone."""
    pods = cluster.get("pods", f"--namespace={OPERATOR_NAMESPACE}", f"--selector={OPERATOR}")["items"]
    names = [pod["metadata"]["name"] for pod in pods]
    holders = [lease["spec"].get("holderIdentity", "") for lease in cluster.get("leases", f"--namespace={OPERATOR_NAMESPACE}")["items"]]
    return names[0] if len(names) == 1 and any(holder.startswith(f"{names[0]}-") for holder in holders) else ""


def num_reconciles(cluster: Kubernetes) -> float:
    """How often the operator that leads has worked on a PDCluster; 0 while none does."""
    pod = operator_pod(cluster)
    if not pod:
        return 0.0
    page = cluster.kubectl("get", "--raw", f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods/{pod}:8080/proxy/metrics")
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(RECONCILES))


def let_the_operator_look(cluster: Kubernetes) -> None:
    """Return when the operator has worked on the object again, at least twice, and has nothing left to do."""
    for _ in range(2):
        before = num_reconciles(cluster)
        cluster.kubectl("annotate", "--overwrite", f"pdc/{NAME}", f"e2e/look={uuid.uuid4().hex}")
        wait_for(partial(looked_since, cluster, before), 60.0, "the operator to look at the object")


def looked_since(cluster: Kubernetes, before: float) -> bool:
    return num_reconciles(cluster) > before


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
    cluster.kubectl("rollout", "restart", f"deployment/{RELEASE}", f"--namespace={OPERATOR_NAMESPACE}")
    wait_for(lambda: operator_pod(cluster) not in ("", old), 120.0, "another operator to lead")


@pytest.mark.parametrize("act", [apply_twice, replace, apply_on_the_server, upgrade_the_release, restart_the_operator])
def test_nothing_is_touched_by(chat: Kubernetes, act: Callable[[Kubernetes], None]) -> None:
    let_the_operator_look(chat)
    before = children(chat)
    assert {"Pod", "StatefulSet", "Service", "Secret", "ConfigMap", "PDPoolScaler"} <= {name.partition("/")[0] for name in before}

    act(chat)
    let_the_operator_look(chat)

    assert children(chat) == before
    assert chat.is_ready()


def test_changed_and_deleted_children_are_put_back(chat: Kubernetes) -> None:
    service = chat.get(f"service/{NAME}")
    (decode,) = chat.get("statefulsets", f"--selector={SELECTOR},pdcluster.io/role=decode")["items"]
    name, pods = decode["metadata"]["name"], {pod["metadata"]["uid"] for pod in chat.pods()}

    chat.kubectl("delete", f"service/{NAME}")
    chat.kubectl("scale", f"statefulset/{name}", "--replicas=3")

    wait_for(lambda: chat.get(f"statefulset/{name}")["spec"]["replicas"] == 1, 60.0, "the StatefulSet to be put back")
    wait_for(lambda: chat.kubectl("get", "service", NAME, "--ignore-not-found"), 60.0, "the Service to be made again")
    assert chat.get(f"service/{NAME}")["spec"]["selector"] == service["spec"]["selector"]
    wait_for(lambda: {pod["metadata"]["uid"] for pod in chat.pods()} == pods, 180.0, "the pods of before, and no others")
