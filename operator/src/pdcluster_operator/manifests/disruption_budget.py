"""PodDisruptionBudgets: a drained node takes one worker of a pool, or one etcd member, at a time."""

from pdcluster_operator.api.labels import CLUSTER, COMPONENT, ETCD, POOL, ROLE, cluster_labels, pool_labels
from pdcluster_operator.manifests.objects import Manifest, Owner, new_object

_KIND = "policy/v1/PodDisruptionBudget"


def pool_budget(owner: Owner, role: str, pool: str) -> Manifest:
    """Of one pool, whatever the revision of its workers."""
    labels = pool_labels(owner.name, role, pool)
    return new_object(_KIND, f"{owner.name}-{role}-{pool}", owner, labels, spec=_spec({CLUSTER: owner.name, ROLE: role, POOL: pool}))


def etcd_budget(owner: Owner) -> Manifest:
    """Of a managed etcd of three, which lives as long as two do."""
    labels = cluster_labels(owner.name, ETCD)
    return new_object(_KIND, f"{owner.name}-etcd", owner, labels, spec=_spec({CLUSTER: owner.name, COMPONENT: ETCD}))


def _spec(selector: dict[str, str]) -> Manifest:
    # AlwaysAllow: a pod that is not ready serves nobody, and must not hold up the drain that may repair it.
    return {"maxUnavailable": 1, "selector": {"matchLabels": selector}, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
