"""The plan of one cluster: what should run.  Its status is planned apart, once that was applied.

Pure, and without memory except the status that was last written.  Everything that is not in a plan
is to be removed; planning again on what a plan led to gives the same plan.
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
    """The size of every declared pool as it is asked for now."""
    return plan_inputs(cluster, observed).sizes


def requested_sizes(cluster: PDCluster, observed: Observed) -> RequestedSizes:
    """Replicas that are asked for now, by workload.

    This includes growth, after which the declared revision is not whole: it cannot take over yet.
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
