"""RolloutOverBudget: a BlueGreen rollout needs more accelerators than autoscale.budget has. Pure.
The budget does not bound it; the status says so before the first new worker. With mode On only.
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
    """Workloads of a roll out."""

    target: str  # the new revision
    workloads: Iterable[Workload]  # of both revisions, at their planned sizes
    sizes: Iterable[PoolSize]  # declared pools
    # workloads that are there: an older one may have other accelerators
    states: Iterable[WorkloadState]

    def accelerators(self) -> tuple[Counter[str], Counter[str]]:
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
