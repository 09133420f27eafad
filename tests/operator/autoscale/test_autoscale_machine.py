"""A random walk over load, sizes, failing pods, capacity and workers that give no numbers, each decision carried out on simulated pools.

Checked on every decision: min and max; the budget, by counting the pods that
exist, also while they come and go; the band is kept once it is met, and met where
growth within bounds, capacity and budget can; a role that has ready workers keeps
one; what changes and what is held is explained.  Under a load that stays the
same sizes come to rest: no pool turns back more often than capacity makes it.
"""

from itertools import pairwise, product
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pdcluster_operator.api.pdcluster import PDClusterSpec
from pdcluster_operator.plan.autoscale.ratio import Band
from pdcluster_operator.plan.autoscale.values import Memory, Outcome
from tests.operator.autoscale.simulated_pools import READY, SimulatedCluster, SimulatedPool
from tests.operator.autoscale.worlds import make_spec, pool, reasons, rules_of, run

GPUS = ("H100", "cpu")  # of equal weight, so that the model may count workers
HIGH = 6
INTERVAL = 15.0
PLENTY = 100


@st.composite
def pools(draw: st.DrawFn) -> list[dict[str, Any]]:
    found = []
    for index in range(draw(st.integers(1, 2))):
        low = draw(st.integers(0, 1))
        found.append(pool(draw(st.integers(1, 4)), f"p{index}", gpu=GPUS[index], minReplicas=low, maxReplicas=HIGH))
    return found


@st.composite
def specs(draw: st.DrawFn) -> PDClusterSpec:
    prefill, decode = draw(pools()), draw(pools())
    num_workers = sum(each["replicas"] for each in [*prefill, *decode])
    ratio = draw(st.sampled_from([{}, {"min": 0.5}, {"max": 1.0}, {"min": 0.5, "max": 1.5}, {"min": 1.0, "max": 1.0}]))
    room = draw(st.sampled_from([None, 0, 1, 4]))
    return make_spec(
        intervalSeconds=int(INTERVAL),
        prefill=prefill,
        decode=decode,
        ratio=ratio,
        budget={} if room is None else {"total": num_workers + room},
        scaleDown={"windowSeconds": draw(st.sampled_from([0, 30, 300])), "maxStep": draw(st.sampled_from([None, 1, 2]))},
        lines={"prefill": {"headroom": draw(st.sampled_from([0.0, 0.3]))}},
        cost={"H100": draw(st.sampled_from([0.5, 2.0]))},
    )


class AutoscaleMachine(RuleBasedStateMachine):
    """One cluster and its autoscaler."""

    @initialize(spec=specs())
    def begin(self, spec: PDClusterSpec) -> None:
        self.spec, self.memory, self.is_calm = spec, Memory(), False
        declared = [(role, each) for role, of_role in spec.roles.present().items() for each in of_role.pools]
        sets = [SimulatedPool(role, each.name, each.gpu, each.replicas) for role, each in declared]
        self.there = SimulatedCluster(sets, dict.fromkeys(GPUS, PLENTY), {"prefill": 1.0, "decode": 1.0})
        self.there.carry_out({each.key: each.replicas for each in sets})
        self.there.schedule()
        self.there.start()

    # What happens around the autoscaler.

    @rule(role=st.sampled_from(["prefill", "decode"]), load=st.sampled_from([0.0, 0.3, 1.0, 2.5, 5.0, 9.0]))
    def change_the_load(self, role: str, load: float) -> None:
        self.there.load[role] = load

    @rule(role=st.sampled_from(["prefill", "decode"]))
    def move_the_load_over(self, role: str) -> None:
        """All load to one role, long enough for the other to give workers up while pods that end hold their places."""
        self.there.load = {"prefill": 0.0, "decode": 0.0, role: 9.0}
        self.decide(330)

    @rule(gpu=st.sampled_from(GPUS), nodes=st.sampled_from([0, 2, 4, PLENTY]))
    def change_the_nodes(self, gpu: str, nodes: int) -> None:
        self.there.nodes[gpu] = nodes

    @rule(data=st.data())
    def lose_a_pod(self, data: st.DataObject) -> None:
        found = [(each, ordinal) for each in self.there.pools for ordinal in each.having(READY)]
        if found:
            each, ordinal = data.draw(st.sampled_from(found))
            del each.pods[ordinal]

    @rule(data=st.data())
    def stop_answering(self, data: st.DataObject) -> None:
        found = [each.pods[ordinal] for each in self.there.pools for ordinal in each.having(READY)]
        if found:
            pod = data.draw(st.sampled_from(found))
            pod.stale = not pod.stale

    @rule()
    def restart_the_operator(self) -> None:
        self.memory = Memory()

    @rule()
    def jump(self) -> None:
        """The machine slept: every window is old."""
        self.there.now += 10_000.0

    @rule()
    def let_pods_start(self) -> None:
        self.there.schedule()
        self.there.start()

    @rule()
    def let_pods_end(self) -> None:
        self.there.end()
        self.check_budget()

    # The autoscaler.

    @rule(seconds=st.sampled_from([15, 60, 330]))
    def decide(self, seconds: int) -> None:
        for _ in range(int(seconds / INTERVAL)):
            self.tick()

    def tick(self) -> Outcome:
        self.there.now += INTERVAL
        self.there.scrape()
        facts = self.there.facts()
        outcome = run(self.spec, facts, self.there.windows, self.memory, now=self.there.now)
        self.check(outcome)
        ready = {role: self.there.ready_of(role) for role in ("prefill", "decode")}
        self.memory = outcome.memory
        self.there.carry_out(outcome.decision.replicas)
        self.check_budget()
        for role, before in ready.items():
            assert before == 0 or self.there.ready_of(role) > 0, outcome.decision
        return outcome

    def check_budget(self) -> None:
        total = self.spec.autoscale.budget.total
        assert total is None or self.there.num_pods() <= total

    def check(self, outcome: Outcome) -> None:
        replicas = outcome.decision.replicas
        declared = {(role, each.name): each for role, of_role in self.spec.roles.present().items() for each in of_role.pools}
        for key, size in replicas.items():
            assert (declared[key].min_replicas or 0) <= size <= HIGH
        for role in ("prefill", "decode"):
            assert sum(size for (each, _), size in replicas.items() if each == role) >= 1
            self.check_held_is_explained(outcome, role)
        self.check_ratio(outcome)

    def check_held_is_explained(self, outcome: Outcome, role: str) -> None:
        shares = {each.name: each for each in outcome.decision.inputs if each.subject == role}
        name = "engine_busy_ratio" if role == "prefill" else "kv_cache_usage_ratio"
        if name in shares and (shares[name].value or 0.0) > (shares[name].limit or 1.0):
            assert rules_of(outcome, role), outcome.decision

    def check_ratio(self, outcome: Outcome) -> None:
        band = Band.of(self.spec.autoscale.ratio)
        before = {each.key: each.replicas for each in self.there.pools}
        given = [step for step in outcome.decision.steps if step.rule == "capacity" and "/" in step.subject]
        base = {**before, **{(step.subject.split("/")[0], step.subject.split("/")[1]): step.after for step in given}}
        away = distance(band, outcome.decision.replicas)
        assert (away > 0.0) == ("RatioConstraintViolated" in reasons(outcome))
        assert away <= distance(band, base)
        if away > 0.0:
            assert not self.could_grow_into(band, base, outcome.memory)

    def could_grow_into(self, band: Band, base: dict[tuple[str, str], int], memory: Memory) -> bool:
        """Whether any growth from `base` would meet the band, tried out one by one."""
        total = self.spec.autoscale.budget.total
        tops = [base[each.key] if each.gpu in memory.backoff else HIGH for each in self.there.pools]
        keys = [each.key for each in self.there.pools]
        for sizes in product(*(range(base[key], top + 1) for key, top in zip(keys, tops, strict=True))):
            held = sum(max(len(each.pods), each.replicas, size) for each, size in zip(self.there.pools, sizes, strict=True))
            if (total is None or held <= total) and distance(band, dict(zip(keys, sizes, strict=True))) == 0.0:
                return True
        return False

    # Rest.

    @precondition(lambda self: not self.is_calm)
    @rule(nodes=st.sampled_from([3, PLENTY]))
    def stay_the_same_for_an_hour(self, nodes: int) -> None:
        self.is_calm = True  # once in a run is enough
        self.there.nodes = dict.fromkeys(GPUS, nodes)
        for each in self.there.pools:
            for pod in each.pods.values():
                pod.stale = False
        sizes: dict[tuple[str, str], list[int]] = {each.key: [each.replicas] for each in self.there.pools}
        for number in range(int(3600 / INTERVAL)):
            outcome = self.tick()
            for key, size in outcome.decision.replicas.items():
                sizes[key].append(size)
            self.there.schedule()
            if number % 2 == 0:
                self.there.start()
                self.there.end()
        spec = self.spec.autoscale
        tries = int(3600 / (spec.backoff_seconds + spec.capacity_seconds)) + 1
        most = 2 if nodes == PLENTY else 2 + 2 * tries * len(self.there.pools)
        for key, seen in sizes.items():
            assert turns(seen) <= most, (key, seen)


def distance(band: Band, replicas: Any) -> float:
    amounts = (float(sum(size for (each, _), size in replicas.items() if each == role)) for role in ("prefill", "decode"))
    return band.distance(*amounts)


def turns(sizes: list[int]) -> int:
    """How often a row of sizes changes its direction."""
    moves = [after - before for before, after in pairwise(sizes) if after != before]
    return sum((one > 0) != (other > 0) for one, other in pairwise(moves))


AutoscaleMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestAutoscale = AutoscaleMachine.TestCase
