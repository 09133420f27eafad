"""A random walk over gated roll outs: the spec changes in the middle, twice and back, users pause,
resume and undo, also after the end, KV is damaged or cannot be verified, and the operator is
killed.

Checked on every plan: the floor, the surge and the budget of a rolling roll out.
At the end it is as declared, or waits with a reason, and goes on when a user resumes it.
"""

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from pdcluster_api.plan.gates import read_gate
from pdcluster_schema import conditions as words
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.plan.clusters import condition_of
from tests.operator.pdcluster_api.plan.rollout.gated_cluster import BUSY, GatedCluster
from tests.operator.pdcluster_api.plan.rollout.rolling_machine import Counts, RollingMachine
from tests.operator.pdcluster_api.plan.simulated import assert_as_declared


class GatesMachine(RollingMachine):
    existing: GatedCluster

    @initialize(
        prefill=st.integers(1, 3),
        decode=st.integers(1, 3),
        surge=st.integers(0, 2),
        unavailable=st.integers(0, 2),
        on_failure=st.sampled_from(["Pause", "Rollback", None]),
    )
    def begin(
        self, prefill: int, decode: int, surge: int, unavailable: int, on_failure: str | None
    ) -> None:
        self.existing, self.engine, self.room = GatedCluster(), 64, None
        self.routers = 0
        self.surge, self.unavailable = surge or int(not unavailable), unavailable
        self.wanted = {"prefill": prefill, "decode": decode}
        self.on_failure = on_failure
        self.existing.settle(self.cluster())

    def cluster(self) -> PDCluster:
        found = super().cluster()
        fields = {"on_failure": self.on_failure, "bake_seconds": 60}
        rollout = found.spec.rollout.model_copy(update=fields)
        return found.model_copy(update={"spec": found.spec.model_copy(update={"rollout": rollout})})

    def change_the_budget(self, room: int | None = None) -> None:
        """No rule here: an old worker that drains already may go though a new one fails, for which
        a budget has no other place.
        """

    def count(self, role: str) -> Counts:
        """Without workers that drain by an earlier plan: growth since then brings none back."""
        found = super().count(role)
        pods = [pod for each in self.existing.observe().workloads for pod in each.pods]
        drain = {pod.name for pod in pods if pod.workload.role == role} & self.existing.commands
        return replace(found, ready=found.ready - len(drain))

    def gap(self, sizes: Mapping[str, int]) -> float:
        """No bound here: a role whose size falls may be further from the ratio for a while."""
        return 0.0

    @rule(on_failure=st.sampled_from(["Pause", "Rollback", None]))
    def change_the_gates(self, on_failure: str | None) -> None:
        self.on_failure = on_failure
        self.existing.generation += 1

    @rule(verb=st.sampled_from(["", "pause", "resume", "undo", "wrong"]))
    def command(self, verb: str) -> None:
        found = read_gate(self.existing.status)
        since = found.since if found is not None and found.since else "2025-01-01T00:00:00Z"
        words_of = {"resume": f"resume {since}", "undo": f"undo {self.existing.generation}"}
        self.existing.command = words_of.get(verb, verb)

    @rule(engine=st.integers(64, 66), fault=st.sampled_from(["", "damaged", BUSY]))
    def transfers_break_or_mend(self, engine: int, fault: str) -> None:
        before, self.engine = self.engine, engine
        self.existing.faults[revision_of(self.cluster().spec)] = fault
        self.engine = before

    @rule(seconds=st.sampled_from([1, 30, 61]))
    def time_passes(self, seconds: int) -> None:
        self.existing.seconds += seconds

    @rule(rounds=st.integers(1, 6))
    def all_goes_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.reconcile(crash=False)
            for workload in sorted({*self.existing.sets, *self.existing.pods}):
                self.existing.step(workload)
            self.existing.seconds += 20

    @rule(rounds=st.integers(1, 6))
    def undo_after_the_end(self, rounds: int) -> None:
        self.existing.command = ""
        self.all_goes_on(20)
        self.existing.command = f"undo {self.existing.generation}"
        self.all_goes_on(rounds)

    def teardown(self) -> None:
        if not hasattr(self, "existing"):
            return
        existing, self.existing.service_refused = self.existing, False
        self.room = None if self.unavailable or self.room is None else max(1, self.room)
        cluster = self.cluster()
        existing.walk(cluster)
        ready = condition_of(existing.status, "Ready")
        held = {words.ROLLOUT_PAUSED, words.ROLLED_BACK}
        assert ready["status"] == "True" or ready["reason"] in held, ready
        for kind in held:
            found = condition_of(existing.status, kind)
            assert not found or found["message"] == ready["message"] or kind != ready["reason"]
        existing.faults.clear()
        for _ in range(12):
            gate = read_gate(existing.status)
            existing.command = f"resume {gate.since}" if gate is not None and gate.since else ""
            existing.walk(cluster)
        assert_as_declared(existing, cluster)
        assert not existing.is_wide


TestGates = GatesMachine.TestCase
TestGates.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
