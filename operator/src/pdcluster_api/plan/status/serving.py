"""Number of workers that should answer requests now, by role.  Pure."""

from pdcluster_api.plan.result import ClusterPlan
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.sections import ROUTER

ANSWERING = ("decode", "mixed", ROUTER)
"""Roles that answer requests; decode and mixed workers behind routers do too."""


def serving_replicas(cluster: PDCluster, plan: ClusterPlan) -> dict[str, int]:
    """Replicas by answering role in the revision that the Service selects; 0 = none of that role.

    Routers count from the time when the Service leads to them.  While the old workers end first,
    as with Recreate, nothing answers: then the declared replicas count.
    """
    found = dict.fromkeys(ANSWERING, 0)
    for role, replicas in _declared(cluster) if plan.ends_first else _planned(plan):
        if role in found and (role != ROUTER or plan.serving_role == ROUTER):
            found[role] += replicas
    return found


def _declared(cluster: PDCluster) -> list[tuple[str, int]]:
    return [
        (role, pool.replicas)
        for role, spec in cluster.spec.roles.present().items()
        for pool in spec.pools
    ]


def _planned(plan: ClusterPlan) -> list[tuple[str, int]]:
    return [
        (each.id.role, each.replicas) for each in plan.workloads if each.id.revision == plan.serving
    ]
