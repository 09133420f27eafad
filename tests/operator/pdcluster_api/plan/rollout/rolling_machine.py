"""A random walk over rolling roll outs: revisions that change in the middle, sizes, budgets, and
workers that start, fail and are lost, each plan carried out on a simulated cluster.

Checked on every plan: no shrink takes ready workers below wanted - unavailable; new workers are
within the budget and the surge; sizes keep the wanted ratio within one worker, or come nearer to
it.  At the end all heals, and the roll out ends as declared.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdcluster_schema.workload import WorkloadId
from tests.operator.pdcluster_api.plan.clusters import Planned, make_cluster, pool
from tests.operator.pdcluster_api.plan.simulated import (
    Pods,
    SimulatedCluster,
    assert_as_declared,
    assert_at_rest,
)

ROLES = ("prefill", "decode")


@dataclass(frozen=True)
class Counts:
    """Workers of one role: by StatefulSets, by pods, and those that serve."""

    sizes: int
    held: int
    ready: int  # that their StatefulSet keeps and the Service reaches


class RollingMachine(RuleBasedStateMachine):
    @initialize(
        prefill=st.integers(1, 4),
        decode=st.integers(1, 4),
        surge=st.integers(0, 2),
        unavailable=st.integers(0, 2),
        routers=st.integers(0, 2),
    )
    def begin(
        self, prefill: int, decode: int, surge: int, unavailable: int, *, routers: int
    ) -> None:
        self.existing, self.engine, self.room = SimulatedCluster(), 64, None
        self.routers = routers
        self.surge, self.unavailable = surge or int(not unavailable), unavailable
        self.wanted = {"prefill": prefill, "decode": decode}
        self.existing.settle(self.cluster())

    def cluster(self) -> PDCluster:
        found = make_cluster(
            prefill=[pool(self.wanted["prefill"])],
            decode=[pool(self.wanted["decode"])],
            engine=self.engine,
            strategy="Rolling",
            routers=self.routers,
        )
        limits = {"max_surge": self.surge, "max_unavailable": self.unavailable}
        rollout = found.spec.rollout.model_copy(update=limits)
        budget = found.spec.autoscale.budget.model_copy(update={"total": self.limit})
        autoscale = found.spec.autoscale.model_copy(update={"budget": budget})
        spec = found.spec.model_copy(update={"rollout": rollout, "autoscale": autoscale})
        return found.model_copy(update={"spec": spec})

    @property
    def limit(self) -> int | None:
        return None if self.room is None else sum(self.wanted.values()) + self.room

    @rule(engine=st.integers(64, 66))
    def change_the_engine(self, engine: int) -> None:
        self.engine = engine
        self.existing.generation += 1

    @rule(role=st.sampled_from(ROLES), size=st.integers(1, 4))
    def change_a_size(self, role: str, size: int) -> None:
        self.wanted[role] = size
        self.existing.generation += 1

    @rule(routers=st.integers(0, 2))
    def change_the_routers(self, routers: int) -> None:
        self.routers = routers
        self.existing.generation += 1

    @rule(room=st.sampled_from([None, 0, 1, 2]))
    def change_the_budget(self, room: int | None) -> None:
        self.room = room

    @rule(refused=st.booleans())
    def the_service_is_refused(self, refused: bool) -> None:
        self.existing.service_refused = refused

    @precondition(lambda self: self.existing.sets)
    @rule(data=st.data(), times=st.integers(1, 4))
    def pods_go_on(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            known = sorted({*self.existing.sets, *self.existing.pods})
            self.existing.step(data.draw(st.sampled_from(known)))

    @precondition(lambda self: self.existing.pods)
    @rule(data=st.data(), ends=st.booleans())
    def a_worker_fails(self, data: st.DataObject, ends: bool) -> None:
        workload = data.draw(st.sampled_from(sorted(self.existing.pods)))
        (self.existing.fail if ends else self.existing.lose_readiness)(workload)

    @rule(crash=st.booleans())
    def reconcile(self, crash: bool) -> None:
        cluster, before = self.cluster(), {role: self.count(role) for role in ROLES}
        plan = self.existing.plan(cluster)
        assert plan == self.existing.plan(cluster)
        self.check(plan, before)
        must_answer = self.existing.num_answering() and self.unavailable < self.wanted["decode"]
        self.existing.carry_out(plan, crash=crash)
        assert self.existing.num_answering() or not must_answer, plan.workloads

    def count(self, role: str) -> Counts:
        ids = {each for each in (*self.existing.sets, *self.existing.pods) if each.role == role}
        pods = {each: self.existing.pods.get(each, Pods()) for each in ids}
        sizes = {each: self.existing.sets.get(each, 0) for each in ids}
        return Counts(
            sum(sizes.values()),
            sum(max(sizes[each], pods[each].living + pods[each].ending) for each in ids),
            sum(
                min(found.ready, sizes[each])
                for each, found in pods.items()
                if self.is_reached(each)
            ),
        )

    def is_reached(self, workload: WorkloadId) -> bool:
        return self.existing.is_wide or workload.revision == self.existing.service

    def check(self, plan: Planned, before: Mapping[str, Counts]) -> None:
        sizes, held = dict.fromkeys(ROLES, 0), 0
        is_rolling = len({each.id.revision for each in plan.workloads}) > 1
        for role in ROLES:
            planned = {each.id: each.replicas for each in plan.workloads if each.id.role == role}
            known = {each for each in self.existing.pods if each.role == role}
            pods = {each: self.existing.pods.get(each, Pods()) for each in {*planned, *known}}
            sizes[role] = sum(planned.values())
            of_role = sum(
                max(planned.get(each, 0), found.living + found.ending)
                for each, found in pods.items()
            )
            held += of_role
            stay = sum(
                min(found.ready, planned.get(each, 0))
                for each, found in pods.items()
                if self.is_reached(each)
            )
            floor = self.wanted[role] - self.unavailable
            assert stay >= min(before[role].ready, floor), (role, stay, plan.workloads)
            if is_rolling:
                most = max(before[role].held, self.wanted[role] + self.surge)
                assert of_role <= max(most, 1), (role, of_role)
        if is_rolling and self.limit is not None:
            most = sum(each.held for each in before.values())
            assert held <= max(self.limit, most), held
        if is_rolling:
            gap = self.gap({role: each.sizes for role, each in before.items()})
            assert self.gap(sizes) <= max(gap, 0.0), (sizes, before)

    def gap(self, sizes: Mapping[str, int]) -> float:
        """Distance to the nearest sizes within one worker of the ratio; 0 or less = within it."""
        margin = max(1, self.surge, self.unavailable)
        lows = [(sizes[role] - margin) / wanted for role, wanted in self.wanted.items()]
        highs = [(sizes[role] + margin) / wanted for role, wanted in self.wanted.items()]
        return max(lows) - min(highs)

    def teardown(self) -> None:
        if not hasattr(self, "existing"):
            return
        self.existing.service_refused = False
        self.room = None if self.unavailable or self.room is None else max(1, self.room)
        cluster = self.cluster()
        self.existing.settle(cluster, rounds=300)
        assert_at_rest(self.existing, cluster)
        assert_as_declared(self.existing, cluster)
        assert {each.revision for each in self.existing.sets} == {revision_of(cluster.spec)}
        assert not self.existing.is_wide
