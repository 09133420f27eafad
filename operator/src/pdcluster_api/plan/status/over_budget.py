"""RolloutOverBudget: a BlueGreen roll out needs more accelerators than autoscale.budget has.

Pure.  Two revisions side by side are not bounded by the budget; how far beyond it they
go is in the status before the first worker of the new one is made.  The condition is
there while workers of both are to run, and counts their sizes, not the pods that come and
go.  Only with mode On: otherwise no budget counts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdcluster_api.plan.observed.state import WorkloadState
from pdcluster_api.plan.sizes.scalers import PoolSize
from pdcluster_api.plan.status.condition import Condition
from pdcluster_schema import conditions as words
from pdcluster_schema.autoscale import AutoscaleSpec, BudgetSpec
from pdcluster_schema.sections import ROUTER
from pdcluster_schema.workload import Workload, WorkloadId


@dataclass(frozen=True)
class SideBySide:
    """Workloads of a roll out.

    target:    the new revision
    workloads: of both revisions, at their planned sizes
    sizes:     declared pools
    states:    workloads that are there: an older one may have other accelerators
    """

    target: str
    workloads: Iterable[Workload]
    sizes: Iterable[PoolSize]
    states: Iterable[WorkloadState]

    def accelerators(self) -> tuple[Counter[str], Counter[str]]:
        """Accelerators by type, of all workloads and of the old revisions'."""
        states = {state.id: state for state in self.states}
        declared = {size.key: (size.pool.gpu, size.gpus_per_replica) for size in self.sizes}
        every, old = Counter[str](), Counter[str]()
        computing = (each for each in self.workloads if each.id.role != ROUTER)
        for workload in computing:
            gpu, number = _of(workload.id, states, declared)
            every[gpu] += number * workload.replicas
            if workload.id.revision != self.target:
                old[gpu] += number * workload.replicas
        return every, old


def _of(
    of: WorkloadId,
    states: Mapping[WorkloadId, WorkloadState],
    declared: Mapping[tuple[str, str], tuple[str, int]],
) -> tuple[str, int]:
    """Type and number of the accelerators of a worker."""
    gpu, number = declared.get((of.role, of.pool), ("", 1))
    state = states.get(of)
    if state is None:
        return gpu, number
    return state.gpu or gpu, state.gpus_per_replica or number


def rollout_over_budget(spec: AutoscaleSpec, rollout: SideBySide) -> Condition | None:
    """The condition; None = no roll out is under way, or it fits."""
    every, old = rollout.accelerators()
    if spec.mode != "On" or not old.total() or every.total() == old.total():
        return None
    beyond = list(_beyond(spec.budget, every))
    if not beyond:
        return None
    message = (
        f"revision {rollout.target} beside the old one needs {', '.join(beyond)}, until the old "
        "workers end; to stay within it, use rollout.strategy Recreate, or raise autoscale.budget"
    )
    kind = words.ROLLOUT_OVER_BUDGET
    return Condition.true(kind, kind, message)


def _beyond(budget: BudgetSpec, held: Counter[str]) -> Iterable[str]:
    if budget.total is not None and held.total() > budget.total:
        over = held.total() - budget.total
        yield f"{held.total()} accelerators, {over} beyond budget.total {budget.total}"
    for gpu, limit in sorted(budget.per_gpu.items()):
        if held[gpu] > limit:
            yield f"{held[gpu]} {gpu}, {held[gpu] - limit} beyond budget.perGpu {limit}"
