"""Walks of a cluster that may sleep: requests come and go, nodes and the budget change, workers and
the operator fail, and it never sleeps beside a request nor lets one wait while workers may come.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdcluster_api.plan.autoscale.values import Memory, Outcome, PoolFacts
from tests.operator.pdcluster_api.plan.autoscale.simulated_pools import (
    SimulatedCluster,
    SimulatedPool,
)
from tests.operator.pdcluster_api.plan.autoscale.sleepers import sleepy
from tests.operator.pdcluster_api.plan.autoscale.worlds import pool, rules_of, run

INTERVAL = 15.0
WINDOW = 60.0  # of `sleepy`
PLENTY = 100
ROLES = ("prefill", "decode")


class Sleeper(SimulatedCluster):
    """Workers that say that they have requests while there is a load, and one router that holds one
    while no decode worker is ready.
    """

    @property
    def has_requests(self) -> bool:
        return any(self.load.values())

    @property
    def held(self) -> float:
        return float(self.has_requests and not self.ready_of("decode"))

    def scrape(self) -> None:
        super().scrape()
        rate = float(self.has_requests)
        for (role, _), rounds in self.windows.items():
            held = self.held if role == "router" else 0.0
            said = {"request_rate": rate, "prompt_token_rate": rate, "held_requests": held}
            workers = tuple(replace(each, **said) for each in rounds[-1].workers)
            rounds[-1] = replace(rounds[-1], workers=workers)


class SleepMachine(RuleBasedStateMachine):
    """last: when there was a request, a change of size or of what the autoscaler knows"""

    @initialize(
        sizes=st.sampled_from([(0, 0), (1, 1), (2, 1), (1, 3)]),
        ratio=st.sampled_from([{}, {"min": 0.5, "max": 2.0}, {"min": 2.0}]),
        total=st.sampled_from([2, 3, 8]),
    )
    def begin(self, sizes: tuple[int, int], ratio: Mapping[str, float], total: int) -> None:
        pools = [[pool(size, minReplicas=0, maxReplicas=4)] for size in sizes]
        self.spec = sleepy(
            routers=1,
            prefill=pools[0],
            decode=pools[1],
            ratio=dict(ratio),
            budget={"total": total},
        )
        sets = [
            SimulatedPool(role, each.name, each.gpu, each.replicas)
            for role, declared in self.spec.roles.present().items()
            for each in declared.pools
        ]
        loads = {"prefill": 0.0, "decode": 0.0, "router": 0.0}
        nodes = {each.gpu: PLENTY for each in sets}
        self.cluster, self.memory, self.last = Sleeper(sets, nodes, loads), Memory(), 0.0
        self.cluster.carry_out({each.key: each.replicas for each in sets})
        self.allowed = sum(sizes)
        self.start()

    @rule(load=st.sampled_from([0.0, 0.0, 0.5, 2.5]))
    def change_the_load(self, load: float) -> None:
        self.cluster.load |= dict.fromkeys(ROLES, load)

    @rule()
    def start(self) -> None:
        self.cluster.schedule()
        self.cluster.start()

    @rule()
    def end(self) -> None:
        self.cluster.end()

    @rule(nodes=st.sampled_from([1, 3, PLENTY]))
    def change_the_nodes(self, nodes: int) -> None:
        self.cluster.nodes = dict.fromkeys(self.cluster.nodes, nodes)

    @rule()
    def restart_the_operator(self) -> None:
        self.memory, self.last = Memory(), self.cluster.now
        self.cluster.windows.clear()

    @rule(data=st.data())
    def stop_answering(self, data: st.DataObject) -> None:
        pods = [pod for each in self.cluster.pools for pod in each.pods.values()]
        if pods:
            pod = data.draw(st.sampled_from(pods))
            pod.stale = not pod.stale

    @rule(seconds=st.sampled_from([15, 75, 315]))
    def decide(self, seconds: int) -> None:
        for _ in range(int(seconds / INTERVAL)):
            self.tick()

    def tick(self) -> Outcome:
        self.cluster.pass_time(INTERVAL)
        self.cluster.scrape()
        facts, now = self.cluster.facts(), self.cluster.now
        before, held = self.sizes(), self.cluster.held
        outcome = run(self.spec, facts, self.cluster.windows, self.memory, now=now)
        routers = {each.key: each.replicas for each in facts if each.role == "router"}
        self.memory = outcome.memory
        self.cluster.carry_out({**outcome.decision.replicas, **routers})
        self.check(outcome, before, facts)
        if not any(before.values()) and any(self.sizes().values()):
            assert held
            assert self.sizes()["decode"]
        if self.cluster.has_requests or self.sizes() != before:
            self.last = now
        return outcome

    def sizes(self) -> dict[str, int]:
        return {each.role: each.replicas for each in self.cluster.pools if each.role != "router"}

    def check(self, outcome: Outcome, before: Mapping[str, int], facts: list[PoolFacts]) -> None:
        after = self.sizes()
        if any(before.values()) and not any(after.values()):
            assert not self.cluster.has_requests
            assert self.cluster.now - self.last >= WINDOW
            assert all(each.ready for each in facts)
        if not any(after.values()) and self.is_held_and_seen():
            assert rules_of(outcome, "prefill")[-1] in ("sleep", "capacity"), outcome.decision

    def is_held_and_seen(self) -> bool:
        workers = self.cluster.windows["router", "r"][-1].workers
        return any(each.held_requests for each in workers)

    @invariant()
    def no_role_serves_alone(self) -> None:
        if self.sizes()["prefill"]:
            assert self.sizes()["decode"]

    @invariant()
    def budget_is_kept(self) -> None:
        pods = sum(len(each.pods) for each in self.cluster.pools if each.role != "router")
        self.allowed = max(self.spec.autoscale.budget.total or 0, min(self.allowed, pods))
        assert pods <= self.allowed

    @rule()
    def sleep_after_an_hour_of_rest_and_wake(self) -> None:
        self.cluster.nodes = dict.fromkeys(self.cluster.nodes, PLENTY)
        for each in self.cluster.pools:
            for pod in each.pods.values():
                pod.stale = False
        self.cluster.load |= dict.fromkeys(ROLES, 0.0)
        self.rest(3600)
        assert set(self.sizes().values()) == {0}
        self.cluster.load |= dict.fromkeys(ROLES, 0.5)
        self.tick()
        assert self.sizes()["decode"] or self.is_impossible()
        self.rest(120)

    def is_impossible(self) -> bool:
        """Return whether no sizes within the budget meet the ratio."""
        ratio, total = self.spec.autoscale.ratio, self.spec.autoscale.budget.total or 0
        return 1 + (ratio.min or 1.0) > total

    def rest(self, seconds: int) -> None:
        for _ in range(int(seconds / INTERVAL)):
            self.tick()
            self.start()
            self.end()


SleepMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)
TestSleep: Any = SleepMachine.TestCase
