"""A simulated cluster with a clock, workers that verify transfers, and commands to its roll out."""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from pdcluster_api.plan.gates import read_gate
from pdcluster_api.plan.observed.state import (
    Attainment,
    Observed,
    PairVerification,
    PairVerifications,
    WorkerRecords,
    WorkloadState,
)
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.workload import PoolPair, WorkloadId
from tests.operator.pdcluster_api.plan.clusters import (
    NOW,
    Planned,
    condition_of,
    make_cluster,
    pool,
)
from tests.operator.pdcluster_api.plan.simulated import SimulatedCluster
from tests.operator.pods import pod_states

BUSY = "busy"


def gated(
    engine: int = 64,
    size: int = 2,
    decode: int | None = None,
    *,
    of_role: dict[str, int] | None = None,
    **rollout: Any,
) -> PDCluster:
    """Rolling, two workers of each role, or `size` of both, or so many of decode; `rollout` has
    further fields of it, as in Python.
    """
    found = make_cluster(
        prefill=[pool(size)],
        decode=[pool(size if decode is None else decode)],
        engine=engine,
        strategy="Rolling",
        of_role=of_role,
    )
    section = found.spec.rollout.model_copy(update=rollout)
    return found.model_copy(update={"spec": found.spec.model_copy(update={"rollout": section})})


@dataclass
class GatedCluster(SimulatedCluster):
    """seconds: since NOW; step_seconds: that a round of `walk` takes
    faults: of verifications by revision, or BUSY
    """

    seconds: int = 0
    step_seconds: int = 20
    faults: dict[str, str] = field(default_factory=dict)
    ended: dict[PoolPair, PairVerification] = field(default_factory=dict)
    commands: frozenset[str] = frozenset()
    attainment: Attainment | None = None
    drains: bool = True  # workers that should drain have no streams left

    @property
    def now(self) -> str:
        at = datetime.fromisoformat(NOW) + timedelta(seconds=self.seconds)
        return at.strftime("%Y-%m-%dT%H:%M:%SZ")

    def _state(self, workload: WorkloadId) -> WorkloadState:
        state = super()._state(workload)
        return replace(state, pods=(*pod_states(workload, range(state.ready)), *state.pods))

    def observe(self) -> Observed:
        found = super().observe()
        names = [pod.name for each in found.workloads for pod in each.pods if pod.ready]
        ended = "drained" if self.drains else "draining"
        states = {name: ended if name in self.commands else "ready" for name in names}
        return replace(
            found,
            worker_records=WorkerRecords(states, self.commands),
            attainment=self.attainment,
            verifications=PairVerifications(dict(self.ended)),
        )

    def plan(self, cluster: PDCluster, now: str = "") -> Planned:
        return super().plan(cluster, now or self.now)

    def carry_out(self, plan: Planned, *, crash: bool = False) -> None:
        super().carry_out(plan, crash=crash)
        self.commands = plan.commands
        for due in () if crash else plan.verify:
            fault = self.faults.get(due.revision, "")
            if fault != BUSY:
                self.ended[due.pair] = PairVerification(
                    *(due.revision, self.now, due.request, fault or None),
                    message="the checksums differ" if fault else "",
                    transport="tcp",
                )

    def round(self, cluster: PDCluster, *, crash: bool = False) -> Planned:
        """One reconcile, and everything that it leads to."""
        plan = self.plan(cluster)
        self.carry_out(plan, crash=crash)
        for workload in sorted({*self.sets, *self.pods}):
            self.step(workload)
        self.seconds += self.step_seconds
        return plan

    def walk(self, cluster: PDCluster, quiet_rounds: int = 5) -> list[Planned]:
        """Rounds until nothing but the time changes for so many: longer than any bake."""
        plans: list[Planned] = []
        quiet = 0
        for _ in range(120):
            before = self._shown()
            plans.append(self.round(cluster))
            quiet = quiet + 1 if self._shown() == before else 0
            if quiet == quiet_rounds:
                return plans
        raise AssertionError(f"no end: {self}")

    def settle(self, cluster: PDCluster, rounds: int = 100) -> Planned:
        return self.walk(cluster)[-1]

    def _shown(self) -> str:
        return repr((self.sets, self.pods, self.status, self.service, self.is_wide, self.command))

    @property
    def gate(self) -> tuple[str, int]:
        found = read_gate(self.status)
        return ("", 0) if found is None else (found.state, found.passed)

    def sizes(self, revision: str, template: str = "") -> dict[str, int]:
        return {
            each.role: size
            for each, size in sorted(self.sets.items())
            if (each.revision, each.template) == (revision, template)
        }

    def condition(self, kind: str) -> tuple[str, str]:
        found = condition_of(self.status, kind)
        return str(found.get("status", "")), str(found.get("reason", ""))
