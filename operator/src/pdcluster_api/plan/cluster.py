"""The plan of one cluster: what should run; all else is to be removed. Pure, and without memory but
the last status: planning again on what a plan led to gives the same plan.
"""

from pdcluster_api.plan.desired import (
    DesiredState,
    kept_workloads,
    leaving_pools,
    target_workloads,
)
from pdcluster_api.plan.drain.disruption import ReadinessDeadline, plan_budgets
from pdcluster_api.plan.inputs import plan_inputs
from pdcluster_api.plan.observed.previous import Previous
from pdcluster_api.plan.observed.state import Observed
from pdcluster_api.plan.result import ClusterPlan
from pdcluster_api.plan.rollout.steps import next_step
from pdcluster_api.plan.sizes.pool_facts import RequestedSizes
from pdcluster_api.plan.sizes.scalers import PoolSize, plan_scaler
from pdcluster_api.plan.status.autoscaled import ON, is_new
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.sections import ROUTER


def plan_cluster(desired: DesiredState) -> ClusterPlan:
    inputs, step, drain = desired.inputs, desired.step, desired.drain
    observed, autoscale = inputs.observed, inputs.cluster.spec.autoscale
    over = desired.over_budget
    is_decision = autoscale.mode == ON and is_new(autoscale, observed)
    is_over = over is not None and not Previous(observed.status).is_true(over.type)
    patience = ReadinessDeadline(desired.now, inputs.deadline)
    return ClusterPlan(
        serving=step.serving,
        serving_role=desired.serving_role,
        workloads=drain.workloads,
        scalers=tuple(
            plan_scaler(inputs.cluster.metadata.name, size, inputs.shown(size), inputs.target)
            for size in inputs.sizes
        ),
        reports_first=is_decision or is_over,
        ends_first=step.waits_for is not None,
        commands=drain.commands,
        cut=drain.cut,
        budgets=plan_budgets(
            desired.serving, observed.workloads, drain.commands, observed.budgets, patience
        ),
        stale_records=desired.registered.stale_records,
        needs_worker_records=drain.needs_worker_records,
    )


def sizes_of(cluster: PDCluster, observed: Observed) -> tuple[PoolSize, ...]:
    return plan_inputs(cluster, observed).sizes


def requested_sizes(cluster: PDCluster, observed: Observed) -> RequestedSizes:
    """Replicas that are asked for now, by workload.  This includes growth, after which the declared
    revision is not whole: it cannot take over yet.
    """
    inputs = plan_inputs(cluster, observed)
    step = next_step(cluster.spec.rollout.strategy, inputs.target, observed, is_target_ready=False)
    workloads = (
        *target_workloads(inputs, step),
        *kept_workloads(inputs, step),
        *leaving_pools(inputs),
    )
    return RequestedSizes(
        inputs.sizes, inputs.target, workloads, is_rolled_back=inputs.is_rolled_back
    )


# Roles that answer requests; decode and mixed workers behind routers do too
ANSWERING = ("decode", "mixed", ROUTER)


def serving_replicas(cluster: PDCluster, plan: ClusterPlan) -> dict[str, int]:
    """Replicas by answering role in the revision that the Service selects; 0 = none of that role.
    Routers count from the time when the Service leads to them. While the old workers end first, as
    with Recreate, nothing answers: then the declared replicas count.
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
