"""A random walk over roll outs, load, limits and pods that start, fail and end in any order, with
every decision carried out.

Checked on every decision: what all StatefulSets may hold as it is carried out is
within each limit, or no more than they would hold without it.  So a roll out
may take what it needs, and growth in the middle of it takes only what is free.
"""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pdcluster_api.plan.autoscale.values import Memory
from pdcluster_api.plan.cluster import requested_sizes
from pdcluster_api.plan.observed.state import (
    Observed,
    ScalerState,
    ScalingDecision,
    WorkerRecords,
    WorkloadState,
)
from pdcluster_api.plan.sizes import ScrapeState, pool_facts
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdcluster_schema.workload import WorkloadId
from tests.operator.pdcluster_api.plan.autoscale.worlds import CALM, IDLE, see
from tests.operator.pdcluster_api.plan.clusters import (
    ETCD_READY,
    NOW,
    Planned,
    make_cluster,
    plan_all,
    pool,
)
from tests.operator.pods import pod_state

TYPES = ("H100", "cpu")
LOADS = {
    "idle": IDLE,
    "calm": CALM,
    "full": replace(CALM, kv_cache_usage_ratio=0.95, engine_busy_ratio=0.95),
    "crowded": replace(CALM, num_requests_waiting=40.0),
}
STARTING, READY, ENDING = "starting", "ready", "ending"


@dataclass
class Kubernetes:
    """StatefulSets, pods by ordinal, the Service, scalers and the status of one PDCluster.
    commands: pods with a drain command
    """

    sets: dict[WorkloadId, int] = field(default_factory=dict)
    pods: dict[WorkloadId, dict[int, str]] = field(default_factory=dict)
    scalers: dict[tuple[str, str], ScalerState] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    service: str | None = None
    commands: frozenset[str] = frozenset()

    def observe(self) -> Observed:
        states = [
            self._state(each)
            for each in sorted({*self.sets, *(each for each, pods in self.pods.items() if pods)})
        ]
        names = [pod.name for state in states for pod in state.pods if pod.ready]
        said = {name: "drained" if name in self.commands else "ready" for name in names}
        return Observed(
            generation=1,
            status=self.status,
            discovery=ETCD_READY,
            workloads=states,
            records=sorted(self.sets),
            scalers=list(self.scalers.values()),
            service_revision=self.service,
            worker_records=WorkerRecords(said, self.commands),
        )

    def _state(self, of: WorkloadId) -> WorkloadState:
        pods = tuple(
            pod_state(of, ordinal, ready=how == READY, terminating=how == ENDING)
            for ordinal, how in sorted(self.pods.get(of, {}).items())
        )
        ready = sum(pod.ready for pod in pods)
        return WorkloadState(
            of,
            self.sets.get(of, 0),
            len(pods),
            ready,
            len(pods),
            gone=of not in self.sets,
            pods=pods,
        )

    def carry_out(self, plan: Planned) -> None:
        for scaler in plan.scalers:
            if scaler.request is not None:
                self.scalers[scaler.role, scaler.pool] = ScalerState(
                    scaler.role, scaler.pool, scaler.request, scaler.seen
                )
        self.service, self.commands, self.status = plan.serving, plan.commands, dict(plan.status)
        self.sets = {workload.id: workload.replicas for workload in plan.workloads}
        for of, pods in self.pods.items():
            pods.update({ordinal: ENDING for ordinal in pods if ordinal >= self.sets.get(of, 0)})

    def at_most(self, before: "Kubernetes", pools: dict[tuple[str, str], int]) -> int:
        """Accelerators of these pools' pods that there can be until the next plan: those that there
        are, and what StatefulSets make or had to make.

        pools: accelerators of a worker
        """
        known = [
            each
            for each in {*before.sets, *self.sets, *self.pods}
            if (each.role, each.pool) in pools
        ]
        sizes = {each: max(before.sets.get(each, 0), self.sets.get(each, 0)) for each in known}
        return sum(
            len({*range(size), *self.pods.get(each, {})}) * pools[each.role, each.pool]
            for each, size in sizes.items()
        )


class BudgetMachine(RuleBasedStateMachine):
    """One PDCluster that is scaled by metrics, beside its Kubernetes."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.existing, self.engine, self.strategy, self.budget = (
            Kubernetes(),
            64,
            "BlueGreen",
            dict[str, Any](),
        )
        self.load = {
            role: data.draw(st.sampled_from(sorted(LOADS))) for role in ("prefill", "decode")
        }
        sizes = data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))
        gpus = data.draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=2, max_size=2))
        self.pools = {
            "prefill": [pool(max(1, sizes[0]), "a", gpu="H100", gpusPerReplica=gpus[0])],
            "decode": [
                pool(max(1, sizes[1]), "a", gpu="H100", gpusPerReplica=gpus[1]),
                pool(sizes[2], "b", gpu="cpu"),
            ],
        }
        self.change_the_budget(
            *data.draw(
                st.tuples(
                    st.sampled_from([None, 0, 1, 3]),
                    st.sampled_from(TYPES),
                    st.none(),
                    st.integers(1, 2),
                )
            )
        )
        self.reconcile()
        self.settle()

    def cluster(self) -> PDCluster:
        found = make_cluster(
            prefill=self.pools["prefill"],
            decode=self.pools["decode"],
            engine=self.engine,
            strategy=self.strategy,
        )
        fields = {
            "mode": "On",
            "budget": self.budget,
            "scaleDown": {"windowSeconds": 0, "maxStep": 0},
        }
        return found.model_copy(
            update={
                "spec": found.spec.model_copy(
                    update={"autoscale": AutoscaleSpec.model_validate(fields)}
                )
            }
        )

    # Users.

    @rule(engine=st.integers(64, 66))
    def roll_out(self, engine: int) -> None:
        self.engine = engine
        self.decide(1)

    @rule(strategy=st.sampled_from(["BlueGreen", "BlueGreen", "Recreate"]))
    def change_the_strategy(self, strategy: str) -> None:
        self.strategy = strategy

    @rule(
        room=st.sampled_from([None, 0, 1, 3, 9]),
        gpu=st.sampled_from(TYPES),
        more=st.sampled_from([None, 0, 1, 3, 9]),
        times=st.integers(1, 2),
    )
    def change_the_budget(self, room: int | None, gpu: str, more: int | None, times: int) -> None:
        """To what the pools began with, or to twice that, and some more; of one type, too."""
        declared = [each for pools in self.pools.values() for each in pools]
        has = {
            of: sum(
                each["replicas"] * each.get("gpusPerReplica", 1)
                for each in declared
                if each["gpu"] == of
            )
            for of in TYPES
        }
        self.budget = {} if room is None else {"total": times * sum(has.values()) + room}
        if more is not None:
            self.budget["perGpu"] = {gpu: max(1, times * has[gpu] + more)}

    @rule(index=st.integers(0, 2), low=st.integers(0, 3))
    def change_a_minimum(self, index: int, low: int) -> None:
        declared = [each for pools in self.pools.values() for each in pools][index]
        declared.update(minReplicas=low, replicas=max(low, declared["replicas"]))

    @precondition(lambda self: self.existing.sets)
    @rule(data=st.data(), replicas=st.integers(0, 5))
    def edit_or_lose_a_stateful_set(self, data: st.DataObject, replicas: int) -> None:
        of = data.draw(st.sampled_from(sorted(self.existing.sets)))
        if replicas:
            self.existing.sets[of] = replicas
            return
        del self.existing.sets[of]
        self.existing.pods[of] = dict.fromkeys(self.existing.pods.get(of, {}), ENDING)

    @rule(data=st.data())
    def edit_the_service(self, data: st.DataObject) -> None:
        self.existing.service = data.draw(
            st.sampled_from([revision_of(self.cluster().spec), "edited", None])
        )

    @rule(role=st.sampled_from(["prefill", "decode"]), load=st.sampled_from(sorted(LOADS)))
    def change_the_load(self, role: str, load: str) -> None:
        self.load[role] = load
        self.decide(1)

    # Pods.

    @rule(data=st.data(), times=st.integers(1, 4))
    def pods_go_on(self, data: st.DataObject, times: int) -> None:
        """One after the other, whichever: a missing one comes, one that starts gets ready, one that
        ends is gone.
        """
        for _ in range(times):
            places = [
                (of, ordinal) for of, size in self.existing.sets.items() for ordinal in range(size)
            ]
            places += [
                (of, ordinal)
                for of, pods in self.existing.pods.items()
                for ordinal, how in pods.items()
                if how == ENDING
            ]
            places = [
                (of, ordinal)
                for of, ordinal in places
                if self.existing.pods.get(of, {}).get(ordinal) != READY
            ]
            if places:
                self.go_on(*data.draw(st.sampled_from(sorted(set(places)))))
        self.decide(1)

    def go_on(self, of: WorkloadId, ordinal: int) -> None:
        pods = self.existing.pods.setdefault(of, {})
        if pods.get(ordinal) == ENDING:
            del pods[ordinal]
        else:
            pods[ordinal] = READY if ordinal in pods else STARTING

    @rule(data=st.data())
    def a_pod_ends(self, data: st.DataObject) -> None:
        found = [
            (of, ordinal)
            for of, pods in sorted(self.existing.pods.items())
            for ordinal in sorted(pods)
        ]
        if found:
            of, ordinal = data.draw(st.sampled_from(found))
            self.existing.pods[of][ordinal] = ENDING

    @rule()
    def settle(self) -> None:
        """All pods at once, without a pass."""
        for of in {*self.existing.sets, *self.existing.pods}:
            self.existing.pods[of] = dict.fromkeys(range(self.existing.sets.get(of, 0)), READY)

    # The operator.

    @rule()
    def reconcile(self) -> None:
        self.existing.carry_out(plan_all(self.cluster(), self.existing.observe(), NOW))

    @rule(passes=st.integers(1, 2))
    def decide(self, passes: int) -> None:
        """A decision is recorded, and the next pass follows it."""
        cluster, observed = self.cluster(), self.existing.observe()
        decision = self.decision(cluster, observed)
        without, then = copy.deepcopy(self.existing), copy.deepcopy(self.existing)
        then.status = {**then.status, "autoscaling": {"mode": "On", "replicas": entries(decision)}}
        for after in (without, then):
            after.carry_out(plan_all(cluster, after.observe(), NOW))
        self.check(without, then)
        self.existing = then
        for _ in range(passes - 1):
            self.reconcile()

    def decision(self, cluster: PDCluster, observed: Observed) -> ScalingDecision:
        seen = ScrapeState([pod.name for state in observed.workloads for pod in state.pods])
        facts = pool_facts(requested_sizes(cluster, observed), observed, seen)
        return see(
            cluster.spec, facts, Memory(), **{role: LOADS[load] for role, load in self.load.items()}
        ).decision

    def check(self, without: Kubernetes, then: Kubernetes) -> None:
        declared = [(role, each) for role, pools in self.pools.items() for each in pools]
        for gpu, limit in {None: self.budget.get("total"), **self.budget.get("perGpu", {})}.items():
            places = {
                (role, each["name"]): each.get("gpusPerReplica", 1)
                for role, each in declared
                if gpu in (None, each["gpu"])
            }
            assert limit is None or then.at_most(self.existing, places) <= max(
                limit, without.at_most(self.existing, places)
            ), (gpu, limit)


def entries(decision: ScalingDecision) -> list[dict[str, Any]]:
    return [
        {"role": role, "pool": name, "replicas": size}
        for (role, name), size in decision.replicas.items()
    ]


TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
