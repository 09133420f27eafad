"""PodDisruptionBudgets: a drained node takes one worker of a pool, or one etcd member, at a time.

Who drains is not ready, and a budget takes it for one that a disruption has
taken already.  So it counts beside the one.
"""

from pdcluster_operator.api.labels import CLUSTER, COMPONENT, ETCD, POOL, ROLE, cluster_labels, pool_labels
from pdcluster_operator.manifests.objects import Manifest, Owner, new_object

_KIND = "policy/v1/PodDisruptionBudget"


def pool_budget(owner: Owner, role: str, pool: str, num_draining: int = 0) -> Manifest:
    """Of one pool, whatever the revision of its workers.  num_draining: of its pods, those that drain and are not ready any more."""
    labels = pool_labels(owner.name, role, pool)
    spec = _spec({CLUSTER: owner.name, ROLE: role, POOL: pool}, 1 + num_draining)
    return new_object(_KIND, f"{owner.name}-{role}-{pool}", owner, labels, spec=spec)


def etcd_budget(owner: Owner) -> Manifest:
    """Of a managed etcd of three, which lives as long as two do."""
    labels = cluster_labels(owner.name, ETCD)
    return new_object(_KIND, f"{owner.name}-etcd", owner, labels, spec=_spec({CLUSTER: owner.name, COMPONENT: ETCD}, 1))


def _spec(selector: dict[str, str], max_unavailable: int) -> Manifest:
    # AlwaysAllow: a pod that fails must not hold up the drain of its node, which may repair it.  A worker that drains and is
    # evicted goes on draining within its grace period, as any that is evicted; nothing could keep its node longer than that.
    return {"maxUnavailable": max_unavailable, "selector": {"matchLabels": selector}, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
