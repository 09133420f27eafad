"""A role that changes alone: its workers are replaced beside those of the others, which stay."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from pdcluster_api.plan.cluster import requested_sizes
from pdcluster_api.plan.sizes import ScrapeState, held_by_type, pool_facts
from pdcluster_schema import conditions as words
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.continuation import Snapshot, continued, snapshot_hashes
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of, templates_of
from pdcluster_schema.workload import WorkloadId
from tests.operator.pdcluster_api.plan.clusters import (
    LATER,
    NOW,
    Planned,
    condition_of,
    identity,
    make_cluster,
)
from tests.operator.pdcluster_api.plan.simulated import SimulatedCluster

PREFILL, DECODE = ("prefill", "cpu"), ("decode", "cpu")
MUCH_LATER = "2026-01-02T09:00:00Z"  # after the deadline


class Walk:
    """A PDCluster of one prefill and two decode workers, with the snapshots of what there is."""

    def __init__(self, strategy: str = "BlueGreen") -> None:
        self.existing, self.strategy = SimulatedCluster(), strategy
        self.hashes: dict[WorkloadId, Mapping[str, str]] = {}
        self.declare()
        self.settle()
        self.revision = revision_of(self.found.spec)

    def declare(self, **fields: Any) -> None:
        self.declared = make_cluster(**{"strategy": self.strategy, **fields})
        self.existing.generation += 1

    @property
    def found(self) -> PDCluster:
        existing = self.existing
        known = [Snapshot(each, self.hashes[each]) for each in existing.records]
        ending = {each: True for each, pods in existing.pods.items() if pods.ending}
        others = {each: ends for each, ends in ending.items() if each not in existing.records}
        return continued(self.declared, known, others)

    @property
    def template(self) -> str:
        return templates_of(self.found.spec).get("decode", "")

    def plan(self, now: str = NOW) -> Planned:
        return self.existing.plan(self.found, now)

    def reconcile(self, now: str = NOW, *, crash: bool = False) -> Planned:
        found, plan = self.found, self.plan(now)
        for workload in (each.id for each in plan.workloads):
            if workload not in self.existing.records:
                self.hashes[workload] = snapshot_hashes(found.spec, workload.role)
        self.existing.carry_out(plan, crash=crash)
        return plan

    def step(self) -> None:
        for workload in sorted({*self.existing.sets, *self.existing.pods}):
            self.existing.step(workload)

    def settle(self, now: str = NOW) -> Planned:
        for _ in range(40):
            before = repr(self.existing)
            plan = self.reconcile(now)
            self.step()
            if repr(self.existing) == before:
                return plan
        raise AssertionError(f"it does not come to rest: {self.existing}")

    def ready(self, role: str) -> int:
        return sum(pods.ready for each, pods in self.existing.pods.items() if each.role == role)

    def sizes(self, plan: Planned, role: str = "decode") -> dict[str, int]:
        return {each.id.template: each.replicas for each in plan.workloads if each.id.role == role}


def decode_selector(plan: Planned) -> str:
    (scaler,) = (each for each in plan.scalers if each.role == "decode")
    return str(scaler.status["selector"])


def shown(plan: Planned, kind: str) -> tuple[str, str, str]:
    found = condition_of(plan.status, kind)
    return found["status"], found["reason"], found["message"]


def test_new_decode_workers_come_beside_the_old_ones_and_prefill_stays() -> None:
    walk = Walk()
    walk.declare(of_role={"decode": 32})
    started = walk.reconcile()

    assert walk.sizes(started) == {"": 2, walk.template: 2}
    assert [each.reason for each in started.events] == [words.ROLLOUT_STARTED]
    status, reason, message = shown(started, words.READY)
    assert (status, reason) == ("False", words.ROLLING_OUT)
    assert message.startswith(f"roll out to decode of revision {walk.revision}: decode: 0 of 2")
    assert message.endswith("the workers before them go on serving")

    while len(walk.existing.sets) == 3:
        walk.step()
        assert (walk.ready("decode") >= 2, walk.ready("prefill")) == (True, 1)
        plan = walk.reconcile()
        assert walk.sizes(plan, "prefill") == {"": 1}
        assert plan.serving == walk.revision

    assert walk.sizes(walk.settle()) == {walk.template: 2}
    assert shown(walk.plan(), words.READY)[0] == "True"
    assert walk.plan(LATER).events == ()


def test_with_recreate_the_old_ones_of_that_role_end_first() -> None:
    walk = Walk("Recreate")
    walk.declare(of_role={"decode": 32})
    first = walk.reconcile()

    assert (walk.sizes(first), walk.sizes(first, "prefill")) == ({}, {"": 1})
    assert first.ends_first
    assert "the old revision has to end first; 2 of its pods are left" in shown(first, "Ready")[2]
    rest = walk.settle()
    assert (walk.sizes(rest), walk.ready("decode")) == ({walk.template: 2}, 2)


def test_new_workers_that_never_get_ready_give_their_accelerators_back() -> None:
    walk = Walk()
    walk.declare(of_role={"decode": 32})
    walk.existing.broken.add(walk.template)
    walk.settle()
    late = walk.settle(MUCH_LATER)

    assert (walk.sizes(late), walk.sizes(late, "prefill")) == (
        {"": 2, walk.template: 0},
        {"": 1},
    )
    status, reason, message = shown(late, words.STALLED)
    assert (status, reason) == ("True", words.PROGRESS_DEADLINE_EXCEEDED)
    assert f"no more workers of decode of revision {walk.revision} have become ready" in message
    assert "it is scaled to 0 and the workers before them go on serving" in message
    assert shown(late, words.PREFILL_READY)[0] == shown(late, words.SERVING)[0] == "True"

    walk.declare()  # the previous file
    assert walk.sizes(walk.settle(MUCH_LATER)) == {"": 2}


def test_a_change_of_all_in_the_middle_replaces_both() -> None:
    walk = Walk()
    walk.declare(of_role={"decode": 32})
    walk.reconcile()
    middle = walk.template
    walk.declare(engine=65)
    plan = walk.reconcile()

    old = {each.id for each in plan.workloads if each.id.revision == walk.revision}
    assert old == {
        identity(walk.revision, *PREFILL),
        identity(walk.revision, *DECODE),
        WorkloadId("chat", *DECODE, walk.revision, middle),
    }
    assert {each.id.revision for each in walk.settle().workloads} == {
        revision_of(walk.declared.spec)
    }


def test_growth_in_the_middle_is_for_both() -> None:
    walk = Walk()
    walk.declare(of_role={"decode": 32})
    walk.existing.broken.add(walk.template)
    walk.settle()
    walk.existing.scale(DECODE, 3)

    assert walk.sizes(walk.reconcile()) == {"": 3, walk.template: 3}


def test_accelerators_of_both_count_and_the_old_ones_numbers_are_shown_meanwhile() -> None:
    walk = Walk()
    walk.declare(of_role={"decode": 32})
    plan = walk.reconcile()
    observed = walk.existing.observe()
    facts = pool_facts(requested_sizes(walk.found, observed), observed, ScrapeState())

    assert held_by_type(facts) == {"cpu": 1 + 2 + 2}
    of_old, of_new = "!pdcluster.io/template", f"pdcluster.io/template={walk.template}"
    assert decode_selector(plan).endswith(f",{of_old}")
    assert decode_selector(walk.settle()).endswith(f",{of_new}")
    assert plan.status["decode"] == "2/2"
    (decode,) = (each for each in plan.status["roles"] if each["name"] == "decode")
    assert (decode["pools"][0]["ready"], decode["pools"][0]["updated"]) == (2, 0)


def test_a_budget_that_both_exceed_is_said_before_the_first_new_worker() -> None:
    walk = Walk()
    walk.declare(of_role={"decode": 32})
    autoscale = AutoscaleSpec.model_validate({"mode": "On", "budget": {"total": 4}})
    spec = walk.declared.spec.model_copy(update={"autoscale": autoscale})
    walk.declared = walk.declared.model_copy(update={"spec": spec})
    plan = walk.plan()

    assert plan.reports_first
    assert "needs 5 accelerators, 1 beyond" in shown(plan, words.ROLLOUT_OVER_BUDGET)[2]


@pytest.mark.parametrize("moment", range(6))
def test_an_operator_that_is_killed_in_any_step_goes_on(moment: int) -> None:
    walk = Walk()
    walk.declare(of_role={"decode": 32})
    for number in range(6):
        walk.reconcile(crash=number == moment)
        walk.step()
        assert walk.ready("decode") >= 2

    assert walk.sizes(walk.settle()) == {walk.template: 2}


class RoleMachine(RuleBasedStateMachine):
    """Changes of one role, of another and of all, in the middle of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.walk = Walk()
        self.fields: dict[str, Any] = {}

    @rule(decode=st.integers(31, 32), prefill=st.sampled_from([64, 31]), engine=st.integers(64, 65))
    def change(self, decode: int, prefill: int, engine: int) -> None:
        of_role = {"decode": decode, "prefill": prefill}
        self.walk.declare(of_role=of_role, engine=engine)

    @rule(crash=st.booleans(), times=st.integers(1, 5))
    def go_on(self, crash: bool, times: int) -> None:
        for _ in range(times):
            self.check()
            self.walk.reconcile(crash=crash)
            self.walk.step()

    def check(self) -> None:
        """Workers that answer in the revision stay until others of their role are ready."""
        plan, found = self.walk.plan(), self.walk.found
        planned = {each.id: each.replicas for each in plan.workloads}
        target, templates = revision_of(found.spec), templates_of(found.spec)
        assert len({each.revision for each in planned}) <= 2
        for workload, size in self.walk.existing.sets.items():
            pods = self.walk.existing.pods.get(workload)
            is_serving = workload.revision == self.walk.existing.service
            if pods is None or not pods.ready or not is_serving:
                continue
            own = WorkloadId("chat", workload.role, "cpu", target, templates.get(workload.role, ""))
            there = self.walk.existing.pods.get(own)
            if there is None or there.ready < self.walk.existing.sets.get(own, 1):
                assert planned.get(workload, 0) >= size

    def teardown(self) -> None:
        rest = self.walk.settle()
        found = self.walk.found
        templates = templates_of(found.spec)
        assert {each.id: each.replicas for each in rest.workloads} == {
            WorkloadId("chat", role, "cpu", revision_of(found.spec), templates.get(role, "")): size
            for role, size in (("prefill", 1), ("decode", 2))
        }
        assert shown(rest, words.READY)[0] == "True"


TestRoleMachine = RoleMachine.TestCase
TestRoleMachine.settings = settings(max_examples=25, stateful_step_count=12)
