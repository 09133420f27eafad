"""PodDisruptionBudgets: a drained node takes one worker of a workload that serves, or one etcd
member, at a time.

Workers of a revision that does not serve yet have none: whatever becomes of
them, it neither interrupts a request nor holds up the drain of a node.
"""

from pdcluster_api.manifests.objects import Manifest, Owner, new_object, workload_selector
from pdcluster_schema.labels import CLUSTER, COMPONENT, ETCD, cluster_labels, workload_labels
from pdcluster_schema.workload import WorkloadId

_KIND = "policy/v1/PodDisruptionBudget"


def workload_budget(owner: Owner, workload: WorkloadId, min_available: int) -> Manifest:
    """Budget of one pool and revision.

    min_available: workers that an eviction has to leave ready.
    """
    labels = workload_labels(workload.cluster, workload.role, workload.pool, workload.revision)
    spec = _spec(workload_selector(workload), {"minAvailable": min_available})
    return new_object(_KIND, workload.name, owner, labels, spec=spec)


def etcd_budget(owner: Owner) -> Manifest:
    """Budget of a managed etcd of three, which lives as long as two do."""
    labels = cluster_labels(owner.name, ETCD)
    return new_object(
        _KIND,
        f"{owner.name}-etcd",
        owner,
        labels,
        spec=_spec({CLUSTER: owner.name, COMPONENT: ETCD}, {"maxUnavailable": 1}),
    )


def _spec(selector: dict[str, str], bound: dict[str, int]) -> Manifest:
    # AlwaysAllow: a pod that fails must not hold up the drain of its node, which may repair it.  A
    # worker that drains and is
    # evicted goes on draining within its grace period, as any that is evicted; nothing could keep
    # its node longer than that.
    return {
        **bound,
        "selector": {"matchLabels": selector},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
