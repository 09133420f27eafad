"""The step of a rolling roll out that a plan takes, from what was observed."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pdcluster_api.plan.drain.disruption import ReadinessDeadline
from pdcluster_api.plan.drain.draining import ordinal_of
from pdcluster_api.plan.inputs import PlanInputs
from pdcluster_api.plan.observed.state import WorkloadState
from pdcluster_api.plan.rolling.fleet import (
    PREFILL,
    AcceleratorBudget,
    NewPool,
    OldWorkers,
    RollingRole,
    can_serve,
)
from pdcluster_api.plan.rolling.steps import RollingStep, next_step
from pdcluster_api.plan.sizes import lost_ordinals, without_lost
from pdcluster_api.plan.status.discovery import discovery_answers
from pdcluster_schema.revision import is_rolled_back
from pdcluster_schema.sections import COMPUTING, ENGINELESS, ROUTER
from pdcluster_schema.workload import PoolKey, Workload, WorkloadId


@dataclass(frozen=True)
class RollingPlan:
    inputs: PlanInputs
    now: str | None  # RFC 3339; None = no worker counts as lost

    @cached_property
    def roles(self) -> tuple[RollingRole, ...]:
        """Roles that roll, those that answer first."""
        names = [*(role for role in COMPUTING if role != PREFILL), PREFILL]
        found = (self._role(name) for name in names)
        rolling = [role for role in found if role.pools or role.old]
        is_whole = self.inputs.current != self.inputs.target or self._spans_revisions
        return tuple(role for role in rolling if is_whole or role.old)

    @property
    def _spans_revisions(self) -> bool:
        return any(each.revision != self.inputs.target for each in self.old)

    @cached_property
    def old(self) -> tuple[WorkloadId, ...]:
        """Workloads that others take the place of, and that serve."""
        inputs = self.inputs
        serving = {inputs.target, inputs.current}
        states = [
            state.id
            for state in inputs.observed.workloads
            if not state.gone and (inputs.observed.service_is_wide or state.id.revision in serving)
        ]
        lost = [each for each in inputs.observed.records if each.revision == inputs.current]
        return tuple(sorted({each for each in (*states, *lost) if not self._is_declared(each)}))

    def _is_declared(self, workload: WorkloadId) -> bool:
        """Return whether it is of a pool as it is declared: others go step by step too."""
        has_pool = (workload.role, workload.pool) in self._declared_pools
        return has_pool and self.inputs.declared.has(workload)

    @cached_property
    def _declared_pools(self) -> frozenset[PoolKey]:
        return frozenset(size.key for size in self.inputs.sizes)

    @property
    def _ending(self) -> list[WorkloadState]:
        """Workloads that are only there as far as their pods have not ended."""
        states, old = self.inputs.observed.workloads, self.old
        return [
            state for state in states if state.id not in old and not self._is_declared(state.id)
        ]

    @property
    def budget(self) -> AcceleratorBudget:
        found = self.inputs.cluster.spec.autoscale.budget
        return AcceleratorBudget(found.total, found.per_gpu)

    @property
    def serves(self) -> bool:
        """True if the Service leads to new workers, too."""
        observed = self.inputs.observed
        return observed.service_is_wide or observed.service_revision == self.inputs.target

    @cached_property
    def step(self) -> RollingStep:
        gate = self.inputs.gate
        passed = None if gate is None else gate.passed
        return next_step(self.roles, self.budget, serves=self.serves, passed=passed)

    @property
    def is_asleep(self) -> bool:
        """True if none of its roles is to have a worker."""
        return not any(role.desired for role in self.roles)

    @property
    def _has_gates(self) -> bool:
        """True if each step has a gate, which the way back has not."""
        spec = self.inputs.cluster.spec
        return spec.rollout.on_failure is not None and not is_rolled_back(spec)

    @property
    def keeps_old(self) -> bool:
        """True if workloads of the old revision stay, without workers too, to go back to."""
        gate = self.inputs.gate
        return self._has_gates if gate is None else gate.is_open

    def _size(self, workload: WorkloadId) -> int:
        return self.inputs.size_before(workload) or 0

    @cached_property
    def is_wide(self) -> bool:
        """Return whether the Service may lead to workers of every revision: it does, or the new one
        can serve.
        """
        observed = self.inputs.observed
        if not self._spans_revisions:
            return False
        if observed.service_is_wide:
            return True
        return can_serve(self.roles) and discovery_answers(observed.discovery)

    @property
    def serving(self) -> str:
        """The older revision as long as it has workers."""
        inputs = self.inputs
        is_left = any(each.revision == inputs.current for each in self.old)
        return inputs.current if inputs.current and is_left else inputs.target

    @cached_property
    def kept(self) -> tuple[Workload, ...]:
        return tuple(Workload(each, self._kept_size(each)) for each in self.old)

    def _kept_size(self, workload: WorkloadId) -> int:
        if workload.role in ENGINELESS:
            return self._num_routers(workload)
        return self.step.old.get(workload, 0)

    def _num_routers(self, workload: WorkloadId) -> int:
        """Those that clients may still reach: each leads to one revision alone, so while several
        serve none is left, and decode workers know how many share the limits of a tenant.
        """
        return 0 if self.inputs.observed.service_is_wide else self._size(workload)

    def new_size(self, workload: Workload) -> int:
        if workload.id.role == ROUTER and self._spans_revisions:
            return self._num_routers(workload.id)
        return self.step.new.get((workload.id.role, workload.id.pool), workload.replicas)

    @property
    def message(self) -> str:
        """The step, and what it waits for."""
        step, waits = self.step, list[str]()
        if not self.serves and self.is_wide:
            waits.append("the Service to lead to both revisions")
        waits += [
            f"{_counted(each, f'new {role} worker')} to be ready"
            for role, each in step.starting.items()
        ]
        waits += [
            f"{_counted(each, f'old {role} worker')} to drain"
            for role, each in step.draining.items()
        ]
        what = self.shortage or (f"waits for {' and '.join(waits)}" if waits else "")
        return f"step {step.number} of {step.steps}" + (f": {what}" if what else "")

    @property
    def shortage(self) -> str | None:
        """Accelerators that the budget lacks for the next worker, as text; None = none."""
        return None if self.is_wide and not self.serves else self.shortage_of(self.step)

    def shortage_of(self, step: RollingStep) -> str | None:
        if not step.short:
            return None
        needs = " or ".join(f"{number} {gpu}" for gpu, number in sorted(step.short.items()))
        return (
            f"the next worker of revision {self.inputs.target} needs {needs} more than "
            "autoscale.budget has: raise that, or rollout.maxUnavailable"
        )

    def _role(self, name: str) -> RollingRole:
        inputs = self.inputs
        sizes = [size for size in inputs.sizes if size.role == name]
        pools = tuple(self._pool(size.key, size.desired) for size in sizes)
        most = max((size.gpus_per_replica for size in sizes), default=1)
        accelerators = sum(size.desired * size.gpus_per_replica for size in sizes)
        surge, unavailable = inputs.cluster.spec.rollout.steps(accelerators, most)
        ending = (state for state in self._ending if state.id.role == name)
        old = (
            *(self._old(each) for each in self.old if each.role == name),
            *(
                OldWorkers(
                    *(each.id, 0, frozenset(), frozenset(), self._num_pods(each)),
                    *(each.gpu, each.gpus_per_replica or 1),
                    may_grow=False,
                )
                for each in ending
            ),
        )
        return RollingRole(name, pools, old, surge, unavailable, self._has_gates)

    def _pool(self, key: tuple[str, str], desired: int) -> NewPool:
        size = next(each for each in self.inputs.sizes if each.key == key)
        state = self.inputs.existing.of(*key, self.inputs.target)
        now, ready = (state.desired, state.ready) if state else (0, 0)
        states = [
            each
            for each in self.inputs.observed.workloads
            if (each.id.role, each.id.pool) == key and self.inputs.declared.has(each.id)
        ]
        of = size.pool.gpu, size.gpus_per_replica
        pods = sum(map(self._num_pods, states))
        dead = frozenset[int]().union(*map(self._dead, states))
        return NewPool(key, desired, now, min(ready, now), *of, num_pods=pods, dead=dead)

    def _old(self, workload: WorkloadId) -> OldWorkers:
        inputs = self.inputs
        states = inputs.observed.workloads
        state = next((each for each in states if each.id == workload and not each.gone), None)
        sizes = {size.key: size for size in inputs.sizes}
        pool = sizes.get((workload.role, workload.pool))
        size = inputs.size_before(workload)
        if size is None:
            size = pool.desired if pool and not inputs.observed.service_is_wide else 0
        gpu, gpus = (pool.pool.gpu, pool.gpus_per_replica) if pool else ("", 1)
        dead = self._dead(state) if state else frozenset[int]()
        return OldWorkers(
            workload,
            size,
            frozenset(_ready(state)) if state else frozenset(),
            dead.union(self._lost(state)) if state else dead,
            self._num_pods(state) if state else 0,
            state.gpu or gpu if state else gpu,
            state.gpus_per_replica or gpus if state else gpus,
            may_grow=workload.revision == (inputs.current or inputs.target),
            dead=dead,
        )

    def _dead(self, state: WorkloadState) -> frozenset[int]:
        return lost_ordinals(state, self.inputs.ending.lost)

    def _num_pods(self, state: WorkloadState) -> int:
        return without_lost(state, self.inputs.ending.lost).num_pods

    def _lost(self, state: WorkloadState) -> Iterator[int]:
        if self.now is None:
            return
        patience = ReadinessDeadline(self.now, self.inputs.deadline)
        for pod in state.pods:
            left = patience.seconds_left(pod)
            if left is not None and left <= 0:
                yield ordinal_of(pod)


def _ready(state: WorkloadState) -> Iterator[int]:
    """Ordinals of ready workers; the lowest ones where pods are only counted."""
    pods = [pod for pod in state.pods if pod.name not in state.away]
    ready = [ordinal_of(pod) for pod in pods if pod.ready and not pod.terminating]
    yield from ready or range(state.ready)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def rolling_plan(inputs: PlanInputs, now: str | None = None) -> RollingPlan | None:
    """None = nothing is replaced step by step."""
    found = RollingPlan(inputs, now)
    return found if inputs.is_rolling and found.old else None
