"""A random walk over load, limits, failing pods, capacity and workers that give no numbers, each
decision carried out on simulated pools of 1, 2, 4 or 8 accelerators a worker.

Checked on every decision, and again on the pods that exist as it is carried out
in its worst order and as pods start and end: min and max; the budget of accelerators,
in all and by type; the band is kept once it is met, and met where growth within bounds,
capacity and budget can; a role that has ready workers keeps one, and either both
roles are asked for or none; nothing shrinks by numbers that are missing, before
its window is over, or farther than a step; what changes and what is held is
explained.  Under a load that stays the same but for noise sizes come to rest: no
pool turns back more often than capacity makes it.
"""

from itertools import pairwise, product
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdcluster_api.plan.autoscale.pools import Band
from pdcluster_api.plan.autoscale.values import Memory, Outcome, PoolFacts
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.workload import PoolKey
from tests.operator.pdcluster_api.plan.autoscale.simulated_pools import (
    READY,
    WAITING,
    Pod,
    SimulatedCluster,
    SimulatedPool,
)
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    base_of,
    make_spec,
    pool,
    reasons,
    rules_of,
    run,
)

GPUS = ("H100", "cpu")  # of equal weight, so that the model may count accelerators
ROLES = ("prefill", "decode")
HIGH = 6
INTERVAL = 15.0
PLENTY = 100


@st.composite
def pools(draw: st.DrawFn) -> list[dict[str, Any]]:
    found = []
    for index in range(draw(st.integers(1, 2))):
        low = draw(st.sampled_from([None, 1]))
        gpus = {"gpusPerReplica": draw(st.sampled_from([1, 1, 2, 4, 8]))} if index == 0 else {}
        found.append(
            pool(
                draw(st.integers(1, 4)),
                f"p{index}",
                gpu=GPUS[index],
                minReplicas=low,
                maxReplicas=HIGH,
                **gpus,
            )
        )
    return found


@st.composite
def budgets(draw: st.DrawFn, declared: list[dict[str, Any]]) -> dict[str, Any]:
    """None, or what the pools have and some more; of one type, too."""
    has = {
        gpu: sum(
            each["replicas"] * each.get("gpusPerReplica", 1)
            for each in declared
            if each["gpu"] == gpu
        )
        for gpu in GPUS
    }
    room = draw(st.sampled_from([None, 0, 1, 4, 9]))
    found: dict[str, Any] = {} if room is None else {"total": sum(has.values()) + room}
    gpu, more = draw(st.sampled_from(GPUS)), draw(st.sampled_from([None, 0, 2, 8]))
    if more is not None:
        found["perGpu"] = {gpu: max(1, has[gpu] + more)}
    return found


@st.composite
def specs(draw: st.DrawFn) -> PDClusterSpec:
    prefill, decode = draw(pools()), draw(pools())
    ratio = draw(
        st.sampled_from(
            [{}, {"min": 0.5}, {"max": 1.0}, {"min": 0.5, "max": 1.5}, {"min": 1.0, "max": 1.0}]
        )
    )
    return make_spec(
        intervalSeconds=int(INTERVAL),
        prefill=prefill,
        decode=decode,
        ratio=ratio,
        budget=draw(budgets([*prefill, *decode])),
        scaleDown={
            "windowSeconds": draw(st.sampled_from([0, 30, 300])),
            "maxStep": draw(st.sampled_from([0, 1, 2])),
        },
        lines={"prefill": {"headroom": draw(st.sampled_from([0.0, 0.3]))}},
        cost={"H100": draw(st.sampled_from([0.5, 2.0]))},
    )


def with_budget(spec: PDClusterSpec, **limits: Any) -> PDClusterSpec:
    budget = spec.autoscale.budget.model_copy(update=limits)
    return spec.model_copy(
        update={"autoscale": spec.autoscale.model_copy(update={"budget": budget})}
    )


def with_bounds(spec: PDClusterSpec, key: PoolKey, *, low: int, high: int) -> PDClusterSpec:
    role, name = key
    bounds = {"min_replicas": low, "max_replicas": high}
    of_role = spec.roles.present()[role]
    pools = [
        each.model_copy(update=bounds) if each.name == name else each for each in of_role.pools
    ]
    return spec.model_copy(
        update={
            "roles": spec.roles.model_copy(
                update={role: of_role.model_copy(update={"pools": pools})}
            )
        }
    )


class AutoscaleMachine(RuleBasedStateMachine):
    """One cluster and its autoscaler.  since: by role, from when on its size and the autoscaler's
    memory are as they are
    """

    @initialize(spec=specs())
    def begin(self, spec: PDClusterSpec) -> None:
        self.spec, self.memory, self.is_calm = spec, Memory(), False
        declared = [
            (role, each) for role, of_role in spec.roles.present().items() for each in of_role.pools
        ]
        sets = [
            SimulatedPool(role, each.name, each.gpu, each.replicas, each.gpus_per_replica or 1)
            for role, each in declared
        ]
        self.existing = SimulatedCluster(
            sets, dict.fromkeys(GPUS, PLENTY), {"prefill": 1.0, "decode": 1.0}
        )
        self.since = dict.fromkeys(ROLES, 0.0)
        self.allowed: dict[str | None, int] = {}
        self.existing.carry_out({each.key: each.replicas for each in sets})
        self.existing.schedule()
        self.existing.start()

    # What happens around the autoscaler.

    @rule(role=st.sampled_from(ROLES), load=st.sampled_from([0.0, 0.3, 1.0, 2.5, 5.0, 9.0]))
    def change_the_load(self, role: str, load: float) -> None:
        self.existing.load[role] = load

    @rule(role=st.sampled_from(ROLES))
    def move_the_load_over(self, role: str) -> None:
        """All load to one role, long enough for the other to give workers up while pods that end
        hold their places.
        """
        self.existing.load = {"prefill": 0.0, "decode": 0.0, role: 9.0}
        self.decide(330)

    @rule(gpu=st.sampled_from(GPUS), nodes=st.sampled_from([0, 2, 4, PLENTY]))
    def change_the_nodes(self, gpu: str, nodes: int) -> None:
        self.existing.nodes[gpu] = nodes

    @rule(total=st.sampled_from([None, 2, 4, 7, 12, 25]))
    def change_the_budget(self, total: int | None) -> None:
        self.spec = with_budget(self.spec, total=total)
        self.allow_what_there_is()

    @rule(gpu=st.sampled_from(GPUS), limit=st.sampled_from([None, 1, 3, 6, 17]))
    def change_the_budget_of_a_type(self, gpu: str, limit: int | None) -> None:
        self.spec = with_budget(self.spec, per_gpu={} if limit is None else {gpu: limit})
        self.allow_what_there_is()

    @rule(data=st.data(), low=st.sampled_from([0, 1, 2]), high=st.sampled_from([0, 2, HIGH]))
    def change_the_bounds(self, data: st.DataObject, low: int, high: int) -> None:
        """As a schedule does, or an edit: to nothing, too."""
        chosen = data.draw(st.sampled_from(self.existing.pools))
        self.spec = with_bounds(self.spec, chosen.key, low=min(low, high), high=high)
        self.allow_what_there_is()

    @rule(data=st.data())
    def lose_a_pod(self, data: st.DataObject) -> None:
        found = [(each, ordinal) for each in self.existing.pools for ordinal in each.having(READY)]
        if found:
            each, ordinal = data.draw(st.sampled_from(found))
            del each.pods[ordinal]

    @rule(data=st.data())
    def scale_by_hand(self, data: st.DataObject) -> None:
        """Enlarge a StatefulSet by hand, until the next reconcile reverts it."""
        each = data.draw(st.sampled_from(self.existing.pools))
        each.pods.setdefault(each.replicas, Pod(WAITING, self.existing.now))
        self.allow_what_there_is()

    def allow_what_there_is(self) -> None:
        """A limit that was lowered, or a hand that scaled: from then on there may only be less, as
        far as it is over a limit.
        """
        self.allowed = {gpu: max(self.allowed.get(gpu, 0), self.held(gpu)) for gpu in (None, *GPUS)}

    def held(self, gpu: str | None) -> int:
        pools = [each for each in self.existing.pools if gpu in (None, each.gpu)]
        return sum(
            max(each.top, len(each.pods), each.replicas + each.facts(self.existing.now).ending)
            * each.gpus_per_replica
            for each in pools
        )

    @rule(data=st.data())
    def stop_answering(self, data: st.DataObject) -> None:
        found = [
            each.pods[ordinal] for each in self.existing.pools for ordinal in each.having(READY)
        ]
        if found:
            pod = data.draw(st.sampled_from(found))
            pod.stale = not pod.stale

    @rule(role=st.sampled_from(ROLES))
    def lose_all_numbers(self, role: str) -> None:
        for each in self.existing.pools:
            for ordinal in each.having(READY) if each.role == role else ():
                each.pods[ordinal].stale = True

    @rule()
    def restart_the_operator(self) -> None:
        self.memory = Memory()
        self.existing.windows.clear()
        self.since = dict.fromkeys(ROLES, self.existing.now)

    @rule()
    def jump(self) -> None:
        """The operator slept: every window is old, and so is every recommendation."""
        self.existing.pass_time(10_000.0)
        self.since = dict.fromkeys(ROLES, self.existing.now)

    @rule()
    def let_pods_start(self) -> None:
        self.existing.schedule()
        self.existing.start()

    @rule()
    def let_pods_end(self) -> None:
        self.existing.end()

    # The autoscaler.

    @rule(seconds=st.sampled_from([15, 60, 330]))
    def decide(self, seconds: int) -> None:
        for _ in range(int(seconds / INTERVAL)):
            self.tick()

    def tick(self) -> Outcome:
        self.existing.pass_time(INTERVAL)
        self.existing.scrape()
        facts = self.existing.facts()
        outcome = run(self.spec, facts, self.existing.windows, self.memory, now=self.existing.now)
        base = base_of(facts, outcome.decision)
        self.check(outcome, base)
        self.check_pace(outcome, facts, base)
        self.memory = outcome.memory
        self.carry_out(outcome)
        return outcome

    def carry_out(self, outcome: Outcome) -> None:
        self.allowed = {gpu: min(number, self.held(gpu)) for gpu, number in self.allowed.items()}
        ready = {
            role: sum(len(self.serving(each)) for each in self.existing.pools if each.role == role)
            for role in ROLES
        }
        self.existing.carry_out(outcome.decision.replicas)
        for role, before in ready.items():
            assert before == 0 or self.existing.ready_of(role) > 0, outcome.decision

    @invariant()
    def budget_is_kept(self) -> None:
        budget = self.spec.autoscale.budget
        for gpu, limit in {None: budget.total, **budget.per_gpu}.items():
            assert limit is None or self.existing.num_accelerators(gpu) <= max(
                limit, self.allowed.get(gpu, 0)
            ), (gpu, limit)

    @invariant()
    def both_roles_are_asked_for(self) -> None:
        for role in ROLES:
            assert sum(each.replicas for each in self.existing.pools if each.role == role) >= 1

    def check(self, outcome: Outcome, base: dict[PoolKey, int]) -> None:
        replicas = outcome.decision.replicas
        declared = {
            (role, each.name): each
            for role, of_role in self.spec.roles.present().items()
            for each in of_role.pools
        }
        for key, size in replicas.items():
            assert size <= (declared[key].max_replicas or 0) or "neverAlone" in rules_of(
                outcome, "/".join(key)
            )
            assert size >= (declared[key].min_replicas or 0) or "BudgetTooSmall" in reasons(outcome)
        for role in ROLES:
            self.check_held_is_explained(outcome, role)
        self.check_ratio(outcome, base)

    def check_held_is_explained(self, outcome: Outcome, role: str) -> None:
        """Above its threshold a role has grown or has the reason; a limit is reported in a
        condition.
        """
        shares = {each.name: each for each in outcome.decision.inputs if each.subject == role}
        name = "engine_busy_ratio" if role == "prefill" else "kv_cache_usage_ratio"
        if name in shares and (shares[name].value or 0.0) > (shares[name].limit or 1.0):
            assert rules_of(outcome, role), outcome.decision
        cut = [
            step
            for step in outcome.decision.steps
            if step.subject == role and step.after < step.before
        ]
        # what the ratio alone added, for sizes that the budget then forbids, is no need of the role
        sizes = [step.before for step in outcome.decision.steps if step.subject == role]
        if {step.rule for step in cut} & {"bounds", "budget", "capacity"} and cut[-1].after < min(
            cut[0].before, *sizes
        ):
            explained = {"ScalingLimited", "CapacityShort", "RatioConstraintViolated"}
            explained.add("BudgetTooSmall")  # minReplicas ask for more than the budget has
            assert explained & set(reasons(outcome)), outcome.decision

    def check_pace(
        self, outcome: Outcome, facts: list[PoolFacts], base: dict[PoolKey, int]
    ) -> None:
        down = self.spec.autoscale.scale_down
        for role in ROLES:
            before, after = (sum_of(sizes, role) for sizes in (base, outcome.decision.replicas))
            if before != sum(each.replicas for each in facts if each.role == role):
                self.since[role] = self.existing.now  # capacity or a limit took some: another size
            if after < before:
                assert not any(
                    pod.stale
                    for each in self.existing.pools
                    if each.role == role
                    for pod in self.serving(each)
                )
                assert self.existing.now - self.since[role] >= down.window_seconds
                assert before - after <= (down.max_step or HIGH * 2)
            if after != before:
                self.since[role] = self.existing.now

    @staticmethod
    def serving(each: SimulatedPool) -> list[Pod]:
        return [each.pods[ordinal] for ordinal in each.having(READY) if ordinal < each.replicas]

    def check_ratio(self, outcome: Outcome, base: dict[PoolKey, int]) -> None:
        band = Band.of(self.spec.autoscale.ratio)
        away = self.distance(band, outcome.decision.replicas)
        assert (away > 0.0) == ("RatioConstraintViolated" in reasons(outcome))
        assert away <= self.distance(band, base)
        # unequal pools of a role grow in the order of their prices, which may pass a band by
        if away > 0.0 and all(len(set(numbers)) == 1 for numbers in self.gpus_by_role().values()):
            assert not self.could_grow_into(band, base, outcome.memory)

    def could_grow_into(self, band: Band, base: dict[PoolKey, int], memory: Memory) -> bool:
        """Return whether any growth from `base` would meet the band, tried out one by one."""
        highs = {
            (role, each.name): each.max_replicas or 0
            for role, of in self.spec.roles.present().items()
            for each in of.pools
        }
        tops = [
            base[each.key] if each.gpu in memory.backoff else max(base[each.key], highs[each.key])
            for each in self.existing.pools
        ]
        keys = [each.key for each in self.existing.pools]
        for sizes in product(
            *(range(base[key], top + 1) for key, top in zip(keys, tops, strict=True))
        ):
            vector = dict(zip(keys, sizes, strict=True))
            if self.distance(band, vector) == 0.0 and self.fits(sizes):
                return True
        return False

    def gpus_by_role(self) -> dict[str, list[int]]:
        return {
            role: [each.gpus_per_replica for each in self.existing.pools if each.role == role]
            for role in ROLES
        }

    def distance(self, band: Band, replicas: Any) -> float:
        accelerators = dict.fromkeys(ROLES, 0.0)
        for each in self.existing.pools:
            accelerators[each.role] += replicas[each.key] * each.gpus_per_replica
        return band.distance(**accelerators)

    def low_of(self, key: PoolKey) -> int:
        role, name = key
        pools = self.spec.roles.present()[role].pools
        return next(each.min_replicas or 0 for each in pools if each.name == name)

    def fits(self, sizes: tuple[int, ...]) -> bool:
        budget = self.spec.autoscale.budget
        for gpu, limit in {None: budget.total, **budget.per_gpu}.items():
            pairs = [
                (each, size)
                for each, size in zip(self.existing.pools, sizes, strict=True)
                if gpu in (None, each.gpu)
            ]
            held = sum(
                max(
                    each.top,
                    len(each.pods),
                    each.replicas + each.facts(self.existing.now).ending,
                    size,
                )
                * each.gpus_per_replica
                for each, size in pairs
            )
            # what a raised minReplicas waits for is not free
            held += sum(
                max(0, self.low_of(each.key) - size) * each.gpus_per_replica for each, size in pairs
            )
            if limit is not None and held > limit:
                return False
        return True

    # Rest.

    @precondition(lambda self: not self.is_calm)
    @rule(nodes=st.sampled_from([3, PLENTY]))
    def stay_the_same_for_an_hour(self, nodes: int) -> None:
        self.is_calm = True  # once in a run is enough
        self.existing.nodes = dict.fromkeys(GPUS, nodes)
        self.existing.noise = 0.03
        for each in self.existing.pools:
            for pod in each.pods.values():
                pod.stale = False
        sizes: dict[PoolKey, list[int]] = {
            each.key: [each.replicas] for each in self.existing.pools
        }
        for number in range(int(3600 / INTERVAL)):
            outcome = self.tick()
            self.budget_is_kept()
            for key, size in outcome.decision.replicas.items():
                sizes[key].append(size)
            self.existing.schedule()
            if number % 2 == 0:
                self.existing.start()
                self.existing.end()
        spec = self.spec.autoscale
        tries = int(3600 / (spec.backoff_seconds + spec.capacity_seconds)) + 1
        most = 2 if nodes == PLENTY else 2 + 2 * tries * len(self.existing.pools)
        for key, seen in sizes.items():
            assert turns(seen) <= most, (key, seen)


def sum_of(sizes: Any, role: str) -> int:
    return sum(size for (each, _), size in sizes.items() if each == role)


def turns(sizes: list[int]) -> int:
    """Count how often a row of sizes changes its direction."""
    moves = [after - before for before, after in pairwise(sizes) if after != before]
    return sum((one > 0) != (other > 0) for one, other in pairwise(moves))


AutoscaleMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None
)
TestAutoscale = AutoscaleMachine.TestCase
