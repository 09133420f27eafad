"""The operator as the tests watch it: the leader, and its reconciles of an object."""

import uuid
from functools import partial

from e2e.harness import NAME, OPERATOR_NAMESPACE, Kubernetes
from tests.system.waiting import wait_for

OPERATOR = "app.kubernetes.io/component=operator"
RECONCILES = "pdcluster_operator_reconcile_seconds_count"


def operator_pod(cluster: Kubernetes) -> str:
    """Name of the operator that leads, once the one before is gone."""
    pods = cluster.get("pods", f"--namespace={OPERATOR_NAMESPACE}", f"--selector={OPERATOR}")[
        "items"
    ]
    names = [pod["metadata"]["name"] for pod in pods]
    holders = [
        lease["spec"].get("holderIdentity", "")
        for lease in cluster.get("leases", f"--namespace={OPERATOR_NAMESPACE}")["items"]
    ]
    return (
        names[0]
        if len(names) == 1 and any(holder.startswith(f"{names[0]}-") for holder in holders)
        else ""
    )


def kill_operator(cluster: Kubernetes) -> str:
    """Delete the operator that leads by force, which leaves it a moment at most to end in; returns
    its pod's name.
    """
    pod = operator_pod(cluster)
    assert pod, "no operator leads"
    cluster.kubectl(
        "delete",
        f"pod/{pod}",
        f"--namespace={OPERATOR_NAMESPACE}",
        "--force",
        "--grace-period=0",
        "--wait=false",
    )
    return pod


def num_reconciles(cluster: Kubernetes) -> float:
    """Reconciles of the operator that leads; 0 while none does."""
    pod = operator_pod(cluster)
    if not pod:
        return 0.0
    page = cluster.kubectl(
        "get", "--raw", f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods/{pod}:8080/proxy/metrics"
    )
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(RECONCILES))


def let_the_operator_look(cluster: Kubernetes) -> None:
    """Return when the operator has worked on the object again, at least twice, and has nothing left
    to do.
    """
    for _ in range(2):
        before = num_reconciles(cluster)
        cluster.kubectl("annotate", "--overwrite", f"pdc/{NAME}", f"e2e/look={uuid.uuid4().hex}")
        wait_for(partial(looked_since, cluster, before), 60.0, "the operator to look at the object")


def looked_since(cluster: Kubernetes, before: float) -> bool:
    return num_reconciles(cluster) > before
