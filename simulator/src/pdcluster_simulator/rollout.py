"""A roll out in a simulation: workers of a new revision take the places of old ones, by the
operator's own planner where `rollout.strategy` is Rolling.

Gates are not simulated, and no worker fails to start.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdcluster_api.plan.rolling.fleet import (
    PREFILL,
    AcceleratorBudget,
    NewPool,
    OldWorkers,
    RollingRole,
    can_serve,
)
from pdcluster_api.plan.rolling.steps import in_band, next_step
from pdcluster_schema.workload import PoolKey, WorkloadId
from pdcluster_simulator.cluster import PoolModel
from pdcluster_simulator.revision_workers import RevisionWorkers

Sizes = Mapping[PoolKey, int]


@dataclass
class RolloutFigures:
    """Figures of the time in which both revisions have workers, as seen once in each interval.

    least_ready: by role; most_accelerators: of both revisions together, by type
    out_of_band: intervals in which ready workers were further than one from the desired ratio
    """

    strategy: str
    began: float
    seconds: float | None = None
    intervals: int = 0
    out_of_band: int = 0
    least_ready: dict[str, int] = field(default_factory=dict)
    most_accelerators: dict[str, int] = field(default_factory=dict)

    def add(self, desired: Mapping[str, int], ready: Mapping[str, int], held: Counter[str]) -> None:
        self.intervals += 1
        self.out_of_band += not in_band((ready[role], desired[role]) for role in desired)
        for role, number in ready.items():
            self.least_ready[role] = min(number, self.least_ready.get(role, number))
        for gpu, number in held.items():
            self.most_accelerators[gpu] = max(number, self.most_accelerators.get(gpu, 0))


class SimulatedRollout:
    """serving: revisions that clients' requests meet"""

    def __init__(
        self, old: RevisionWorkers, new: RevisionWorkers, sizes: Sizes, began: float
    ) -> None:
        self.old, self.new = old, new
        self.serving: tuple[RevisionWorkers, ...] = (old,)
        model = old.builder.model
        self._spec, self._pools = model.spec, model.pools
        self._old_sizes, self._new_sizes = dict(sizes), dict.fromkeys(sizes, 0)
        self.figures = RolloutFigures(self._spec.rollout_strategy, began)
        self._began = old.cell.queue.now

    def scale(self, desired: Sizes) -> None:
        """Take the next step towards these sizes."""
        if self._spec.rollout_strategy == "Rolling":
            self._roll(desired)
        elif self._spec.rollout_strategy == "BlueGreen":
            self._replace(desired, is_surge=True)
        else:
            self._replace(desired, is_surge=False)
        for key in desired:
            self.old.scale(key, self._old_sizes[key])
            self.new.scale(key, self._new_sizes[key])

    def _replace(self, desired: Sizes, *, is_surge: bool) -> None:
        """All new workers at once: beside the old ones, of which none goes before, or after."""
        is_new = self.serving == (self.new,)
        if is_surge and not is_new:
            is_new = self._is_whole(desired)
            self._old_sizes = {
                key: max(size, self._old_sizes[key]) for key, size in desired.items()
            }
        if is_new or not is_surge:
            self.serving, self._old_sizes = (self.new,), dict.fromkeys(desired, 0)
        if is_surge or not self.old.cell.workers:
            self._new_sizes = dict(desired)

    def _roll(self, desired: Sizes) -> None:
        roles = [self._role(role, desired) for role in self._roles(desired)]
        serves = self.new in self.serving
        if not serves and can_serve(roles):
            self.serving, serves = (self.old, self.new), True
        budget = self._spec.autoscale.budget
        limits = AcceleratorBudget(budget.total, budget.per_gpu)
        step = next_step(roles, limits, serves=serves)
        self._new_sizes = dict(step.new)
        self._old_sizes = {(each.role, each.pool): size for each, size in step.old.items()}
        if not any(self._old_sizes.values()):
            self.serving = (self.new,)

    def _roles(self, desired: Sizes) -> list[str]:
        """Those that answer first."""
        return sorted({role for role, _ in desired}, key=lambda role: role == PREFILL)

    def _role(self, name: str, desired: Sizes) -> RollingRole:
        pools = [pool for pool in self._pools if pool.key[0] == name]
        accelerators = sum(desired[pool.key] * pool.gpus_per_replica for pool in pools)
        most = max(pool.gpus_per_replica for pool in pools)
        return RollingRole(
            name,
            tuple(self._new_pool(pool, desired[pool.key]) for pool in pools),
            tuple(self._old_workers(pool) for pool in pools),
            *self._spec.rollout.steps(accelerators, most),
        )

    def _new_pool(self, pool: PoolModel, desired: int) -> NewPool:
        key, size = pool.key, self._new_sizes[pool.key]
        ready, pods = len(self.new.served(key)), len(self.new.of(key))
        of = pool.gpu, pool.gpus_per_replica
        return NewPool(key, desired, size, min(ready, size), *of, num_pods=pods)

    def _old_workers(self, pool: PoolModel) -> OldWorkers:
        key = pool.key
        return OldWorkers(
            WorkloadId(self._spec.model.name, *key, "old"),
            self._old_sizes[key],
            frozenset(each.ordinal for each in self.old.served(key)),
            num_pods=len(self.old.of(key)),
            gpu=pool.gpu,
            gpus=pool.gpus_per_replica,
        )

    def observe(self, desired: Sizes) -> None:
        both = (self.old, self.new)
        needed, ready, held = Counter[str](), Counter[str](), Counter[str]()
        for key, number in desired.items():
            needed[key[0]] += number
            ready[key[0]] += sum(len(each.served(key)) for each in both)
            for worker in (worker for each in both for worker in each.of(key)):
                held[worker.gpu] += worker.num_gpus
        self.figures.add(needed, ready, held)
        if self._is_whole(desired) and self.serving == (self.new,) and not self.old.cell.workers:
            self.figures.seconds = self.old.cell.queue.now - self._began

    def _is_whole(self, desired: Sizes) -> bool:
        return all(len(self.new.served(key)) >= number for key, number in desired.items())
